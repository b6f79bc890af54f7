// The libssl that is opened, the error if there is none, and whether openssl.h declares
// its functions as they are, where OpenSSL's headers are found.
#include "tf_ops/transport/openssl.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tf_ops/testing/abi.h"

#if __has_include(<openssl/ssl.h>)
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#endif

namespace keras_hvd::openssl {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

TEST(OpenSslTest, IsFoundByItsUsualNames) {
  Functions functions;
  std::string text;
  ASSERT_EQ(Open("", &functions, &text).message, "");
  EXPECT_THAT(text, StartsWith("OpenSSL "));
  EXPECT_THAT(text, HasSubstr("/libssl.so"));
}

TEST(OpenSslTest, SaysWhereItWasAndWhatToInstall) {
  Functions functions;
  std::string text;
  const Status status = Open("/none/libssl.so.3", &functions, &text);
  EXPECT_THAT(status.message, StartsWith("there is no /none/libssl.so.3. Install "));
  EXPECT_THAT(status.message, HasSubstr("KERAS_HVD_SSL_LIBRARY"));
}

TEST(OpenSslTest, SaysThatALibraryIsTooOldOrAnotherOne) {
  Functions functions;
  std::string text;
  const Status status = Open("libm.so.6", &functions, &text);
  EXPECT_THAT(status.message, HasSubstr("there is no function OpenSSL_version in /"));
  EXPECT_THAT(status.message, HasSubstr("so it has no TLS 1.3. Install "));
}

#ifdef OPENSSL_VERSION_TEXT

// In the order of KERAS_HVD_OPENSSL_FUNCTIONS.
#define KERAS_HVD_REAL_FUNCTIONS(F)                          \
  F(version_text, OpenSSL_version)                           \
  F(version_number, OpenSSL_version_num)                     \
  F(start, OPENSSL_init_ssl)                                 \
  F(get_error, ERR_get_error)                                \
  F(reason, ERR_reason_error_string)                         \
  F(clear_errors, ERR_clear_error)                           \
  F(method, TLS_method)                                      \
  F(new_context, SSL_CTX_new)                                \
  F(control_context, SSL_CTX_ctrl)                           \
  F(set_cipher_suites, SSL_CTX_set_ciphersuites)             \
  F(set_tickets, SSL_CTX_set_num_tickets)                    \
  F(set_use_session, SSL_CTX_set_psk_use_session_callback)   \
  F(set_find_session, SSL_CTX_set_psk_find_session_callback) \
  F(new_connection, SSL_new)                                 \
  F(free_connection, SSL_free)                               \
  F(set_data, SSL_set_ex_data)                               \
  F(get_data, SSL_get_ex_data)                               \
  F(set_bio, SSL_set_bio)                                    \
  F(be_client, SSL_set_connect_state)                        \
  F(set_verify, SSL_set_verify)                              \
  F(be_server, SSL_set_accept_state)                         \
  F(shake_hands, SSL_do_handshake)                           \
  F(is_resumed, SSL_session_reused)                          \
  F(read, SSL_read)                                          \
  F(write, SSL_write)                                        \
  F(update_key, SSL_key_update)                              \
  F(shut_down, SSL_shutdown)                                 \
  F(error_of, SSL_get_error)                                 \
  F(find_cipher, SSL_CIPHER_find)                            \
  F(new_session, SSL_SESSION_new)                            \
  F(free_session, SSL_SESSION_free)                          \
  F(set_key, SSL_SESSION_set1_master_key)                    \
  F(set_cipher, SSL_SESSION_set_cipher)                      \
  F(set_version, SSL_SESSION_set_protocol_version)           \
  F(new_bio_type, BIO_get_new_index)                         \
  F(new_bio_method, BIO_meth_new)                            \
  F(set_bio_write, BIO_meth_set_write)                       \
  F(set_bio_read, BIO_meth_set_read)                         \
  F(set_bio_control, BIO_meth_set_ctrl)                      \
  F(new_bio, BIO_new)                                        \
  F(set_bio_data, BIO_set_data)                              \
  F(get_bio_data, BIO_get_data)                              \
  F(set_bio_ready, BIO_set_init)                             \
  F(set_bio_flags, BIO_set_flags)                            \
  F(clear_bio_flags, BIO_clear_flags)

#define KERAS_HVD_CHECK(member, symbol) \
  static_assert(kPassesAs<decltype(Functions::member), decltype(&symbol)>, #symbol);
KERAS_HVD_REAL_FUNCTIONS(KERAS_HVD_CHECK)
#undef KERAS_HVD_CHECK

static_assert(kTls13 == TLS1_3_VERSION);
static_assert(kSetLeastVersion == SSL_CTRL_SET_MIN_PROTO_VERSION);
static_assert(kSetMostVersion == SSL_CTRL_SET_MAX_PROTO_VERSION);
static_assert(kNoAtExit == OPENSSL_INIT_NO_ATEXIT);
static_assert(kErrorWantRead == SSL_ERROR_WANT_READ);
static_assert(kErrorZeroReturn == SSL_ERROR_ZERO_RETURN);
static_assert(kUpdateNotRequested == SSL_KEY_UPDATE_NOT_REQUESTED);
static_assert(kFlush == BIO_CTRL_FLUSH);
static_assert(kSourceSink == BIO_TYPE_SOURCE_SINK);
static_assert(kRead == BIO_FLAGS_READ);
static_assert(kRetry == BIO_FLAGS_SHOULD_RETRY);

TEST(OpenSslTest, EveryFunctionIsChecked) {
  using Names = std::vector<std::pair<std::string, std::string>>;
  const Names declared = {
#define KERAS_HVD_NAMES(member, symbol, result, parameters) {#member, symbol},
      KERAS_HVD_OPENSSL_FUNCTIONS(KERAS_HVD_NAMES)
#undef KERAS_HVD_NAMES
  };
  const Names checked = {
#define KERAS_HVD_NAMES(member, symbol) {#member, #symbol},
      KERAS_HVD_REAL_FUNCTIONS(KERAS_HVD_NAMES)
#undef KERAS_HVD_NAMES
  };
  EXPECT_EQ(declared, checked);
}

#else
TEST(OpenSslTest, EveryFunctionIsChecked) {
  GTEST_SKIP() << "no headers of OpenSSL are here to check against: install libssl-dev";
}
#endif

}  // namespace
}  // namespace keras_hvd::openssl

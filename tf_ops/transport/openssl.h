// The part of OpenSSL that TLS between hosts needs, opened at run time: 1.1.1b or
// newer, or 3.x, which are alike in it. No header of OpenSSL is needed to build this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tf_ops/transport/status.h"

namespace keras_hvd::openssl {

using Method = struct MethodState;
using Context = struct ContextState;
using Connection = struct ConnectionState;
using Session = struct SessionState;
using Cipher = struct CipherState;
using Digest = struct DigestState;
using Bio = struct BioState;
using BioMethod = struct BioMethodState;
using Settings = struct SettingsState;

using BioWrite = int (*)(Bio* bio, const char* data, int bytes);
using BioRead = int (*)(Bio* bio, char* data, int bytes);
using BioControl = long (*)(Bio* bio, int command, long number, void* pointer);
using Verify = int (*)(int ok, struct CertificateStoreState* store);
using UseSession = int (*)(Connection* connection, const Digest* digest,
                           const unsigned char** identity, size_t* bytes,
                           Session** session);
using FindSession = int (*)(Connection* connection, const unsigned char* identity,
                            size_t bytes, Session** session);

inline constexpr int kTls13 = 0x0304;
inline constexpr int kVerifyPeer = 1;
inline constexpr int kSetLeastVersion = 123;
inline constexpr int kSetMostVersion = 124;
inline constexpr uint64_t kNoAtExit = 0x00080000;
inline constexpr int kErrorWantRead = 2;
inline constexpr int kErrorZeroReturn = 6;
inline constexpr int kUpdateNotRequested = 0;
inline constexpr int kFlush = 11;
inline constexpr int kSourceSink = 0x0400;
inline constexpr int kRead = 1;
inline constexpr int kRetry = 8;

// F(member, "symbol", result, (parameters)).
#define KERAS_HVD_OPENSSL_FUNCTIONS(F)                                                \
  F(version_text, "OpenSSL_version", const char*, (int about))                        \
  F(version_number, "OpenSSL_version_num", unsigned long, ())                         \
  F(start, "OPENSSL_init_ssl", int, (uint64_t options, const Settings* settings))     \
  F(get_error, "ERR_get_error", unsigned long, ())                                    \
  F(reason, "ERR_reason_error_string", const char*, (unsigned long error))            \
  F(clear_errors, "ERR_clear_error", void, ())                                        \
  F(method, "TLS_method", const Method*, ())                                          \
  F(new_context, "SSL_CTX_new", Context*, (const Method* method))                     \
  F(control_context, "SSL_CTX_ctrl", long,                                            \
    (Context * context, int command, long number, void* pointer))                     \
  F(set_cipher_suites, "SSL_CTX_set_ciphersuites", int,                               \
    (Context * context, const char* names))                                           \
  F(set_tickets, "SSL_CTX_set_num_tickets", int, (Context * context, size_t count))   \
  F(set_use_session, "SSL_CTX_set_psk_use_session_callback", void,                    \
    (Context * context, UseSession callback))                                         \
  F(set_find_session, "SSL_CTX_set_psk_find_session_callback", void,                  \
    (Context * context, FindSession callback))                                        \
  F(new_connection, "SSL_new", Connection*, (Context * context))                      \
  F(free_connection, "SSL_free", void, (Connection * connection))                     \
  F(set_data, "SSL_set_ex_data", int,                                                 \
    (Connection * connection, int index, void* data))                                 \
  F(get_data, "SSL_get_ex_data", void*, (const Connection* connection, int index))    \
  F(set_bio, "SSL_set_bio", void, (Connection * connection, Bio * read, Bio * write)) \
  F(be_client, "SSL_set_connect_state", void, (Connection * connection))              \
  F(set_verify, "SSL_set_verify", void,                                               \
    (Connection * connection, int mode, Verify callback))                             \
  F(be_server, "SSL_set_accept_state", void, (Connection * connection))               \
  F(shake_hands, "SSL_do_handshake", int, (Connection * connection))                  \
  F(is_resumed, "SSL_session_reused", int, (const Connection* connection))            \
  F(read, "SSL_read", int, (Connection * connection, void* data, int bytes))          \
  F(write, "SSL_write", int, (Connection * connection, const void* data, int bytes))  \
  F(update_key, "SSL_key_update", int, (Connection * connection, int type))           \
  F(shut_down, "SSL_shutdown", int, (Connection * connection))                        \
  F(error_of, "SSL_get_error", int, (const Connection* connection, int result))       \
  F(find_cipher, "SSL_CIPHER_find", const Cipher*,                                    \
    (Connection * connection, const unsigned char* number))                           \
  F(new_session, "SSL_SESSION_new", Session*, ())                                     \
  F(free_session, "SSL_SESSION_free", void, (Session * session))                      \
  F(set_key, "SSL_SESSION_set1_master_key", int,                                      \
    (Session * session, const unsigned char* key, size_t bytes))                      \
  F(set_cipher, "SSL_SESSION_set_cipher", int,                                        \
    (Session * session, const Cipher* cipher))                                        \
  F(set_version, "SSL_SESSION_set_protocol_version", int,                             \
    (Session * session, int version))                                                 \
  F(new_bio_type, "BIO_get_new_index", int, ())                                       \
  F(new_bio_method, "BIO_meth_new", BioMethod*, (int type, const char* name))         \
  F(set_bio_write, "BIO_meth_set_write", int, (BioMethod * method, BioWrite write))   \
  F(set_bio_read, "BIO_meth_set_read", int, (BioMethod * method, BioRead read))       \
  F(set_bio_control, "BIO_meth_set_ctrl", int,                                        \
    (BioMethod * method, BioControl control))                                         \
  F(new_bio, "BIO_new", Bio*, (const BioMethod* method))                              \
  F(set_bio_data, "BIO_set_data", void, (Bio * bio, void* data))                      \
  F(get_bio_data, "BIO_get_data", void*, (Bio * bio))                                 \
  F(set_bio_ready, "BIO_set_init", void, (Bio * bio, int ready))                      \
  F(set_bio_flags, "BIO_set_flags", void, (Bio * bio, int flags))                     \
  F(clear_bio_flags, "BIO_clear_flags", void, (Bio * bio, int flags))

struct Functions {
#define KERAS_HVD_DECLARE(member, symbol, result, parameters) \
  result(*member) parameters = nullptr;
  KERAS_HVD_OPENSSL_FUNCTIONS(KERAS_HVD_DECLARE)
#undef KERAS_HVD_DECLARE
};

// Opens `name`, a path or a name to look for on the library path; if it is empty, the
// first of the usual names that is there. `text`: its version and file, to read.
Status Open(const std::string& name, Functions* functions, std::string* text);

}  // namespace keras_hvd::openssl

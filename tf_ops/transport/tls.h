// TLS 1.3 over a connected socket, with a key that both ends have already.
//
// The key is an external pre-shared one, always together with an ephemeral exchange: an
// attacker who learns it later cannot read recorded bytes. There are no certificates,
// no session tickets and no early data.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tf_ops/transport/openssl.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

// Opens OpenSSL, and sets it to nothing but this. `library`: libssl, a path or a name;
// "": the system's. A process does so once: later calls find the same. `text`: its
// version, to read.
Status OpenTls(const std::string& library, std::string* text);

// One connection. Nothing waits, and only one thread may use it at a time.
class TlsSession {
 public:
  enum class Role { kClient, kServer };
  // The same at both ends, and new for each connection: the key is used up by it.
  struct Credentials {
    std::array<unsigned char, 32> identity, key;
  };

  // `socket` does not block, and stays the caller's. `library` as for OpenTls.
  static Status Open(const std::string& library, int socket, Role role,
                     const Credentials& credentials,
                     std::unique_ptr<TlsSession>* session);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // Results of the functions below in place of a number of bytes.
  static constexpr int64_t kEnded = 0;  // the other end sends no more, and says so
  static constexpr int64_t kWantsRead = -1;
  static constexpr int64_t kWantsWrite = -2;
  static constexpr int64_t kRefused = -3;  // not from a holder of the key
  static constexpr int64_t kLost = -4;     // the socket has failed, or just ended

  // Returns 1 when it is complete. Needed before all else.
  int64_t Handshake();
  // After kWantsWrite the same bytes must come first again.
  int64_t Write(const iovec* pieces, int count);
  // Returns fewer bytes than there is room for only if no more have come.
  int64_t Read(const iovec* pieces, int count);
  // Tells the other end that no more comes from here, if the socket takes that.
  void EndWriting();

  // Why it has failed, as in "TLS: decryption failed or bad record mac".
  const std::string& why_failed() const { return why_failed_; }
  // The system's error, if it was one of the socket.
  int error() const { return error_; }

 private:
  friend struct TlsCallbacks;

  TlsSession(int socket, const Credentials& credentials);
  Status Start(Role role);
  openssl::Session* NewSession() const;
  int ReadSocket(openssl::Bio* bio, char* data, int bytes);
  bool Encrypt(const iovec* pieces, int count);
  bool EncryptNext(const void* data, size_t bytes);
  bool Flush();
  int64_t OutcomeOf(int result);
  int64_t Fail(int64_t outcome, const std::string& why);
  void FailFor(int error);

  const int socket_;
  const Credentials credentials_;
  openssl::Connection* connection_ = nullptr;
  int64_t failure_ = 0;  // kRefused or kLost, from then on
  std::string why_failed_;
  int error_ = 0;
  bool has_ended_writing_ = false;

  // Bytes that came from the socket and that OpenSSL has not taken yet.
  const std::unique_ptr<char[]> received_;
  size_t received_begin_ = 0, received_end_ = 0;
  // Bytes that OpenSSL has encrypted, from `taken_` ones, and that the socket has not
  // taken yet.
  std::string unsent_;
  size_t sent_ = 0;
  int64_t taken_ = 0;
  int64_t records_ = 0;  // written with the present key
};

}  // namespace keras_hvd

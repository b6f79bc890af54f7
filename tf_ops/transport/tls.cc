#include "tf_ops/transport/tls.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

namespace keras_hvd {
namespace {

// Of the two suites with SHA-256, which keys of 32 bytes go with, the one that
// processors have instructions for.
constexpr char kSuite[] = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kSuiteNumber[] = {0x13, 0x01};

// The most bytes of a record.
constexpr size_t kRecordBytes = 16 << 10;
// How much is encrypted before the socket gets it, and read from it at once.
constexpr int64_t kBytesAtOnce = 128 << 10;
// AES-GCM is safe for 2^24.5 full records with one key (RFC 8446, 5.5).
constexpr int64_t kRecordsPerKey = 1 << 16;

// OpenSSL, once it is open. Never freed, as connections may outlive static objects.
struct Opened {
  openssl::Functions functions;
  std::string text;
  openssl::Context* context = nullptr;
  openssl::BioMethod* socket_method = nullptr;
};
std::atomic<const Opened*> g_opened{nullptr};

const openssl::Functions& OpenSsl() { return g_opened.load()->functions; }

}  // namespace

// The functions that OpenSSL calls.
struct TlsCallbacks {
  static TlsSession* Of(openssl::Connection* connection) {
    return static_cast<TlsSession*>(OpenSsl().get_data(connection, 0));
  }

  static TlsSession* Of(openssl::Bio* bio) {
    return static_cast<TlsSession*>(OpenSsl().get_bio_data(bio));
  }

  // A client's session, which then belongs to OpenSSL.
  static int UseSession(openssl::Connection* connection, const openssl::Digest*,
                        const unsigned char** identity, size_t* bytes,
                        openssl::Session** session) {
    const TlsSession* const own = Of(connection);
    *identity = own->credentials_.identity.data();
    *bytes = own->credentials_.identity.size();
    *session = own->NewSession();
    return *session != nullptr;
  }

  // A server's. Without one the handshake fails, as it has no certificate.
  static int FindSession(openssl::Connection* connection, const unsigned char* identity,
                         size_t bytes, openssl::Session** session) {
    const TlsSession* const own = Of(connection);
    const auto& expected = own->credentials_.identity;
    const bool same = bytes == expected.size() &&
                      memcmp(identity, expected.data(), expected.size()) == 0;
    *session = same ? own->NewSession() : nullptr;
    return 1;
  }

  static int Read(openssl::Bio* bio, char* data, int bytes) {
    return Of(bio)->ReadSocket(bio, data, bytes);
  }

  // Takes everything, so OpenSSL never waits for the socket in the middle of a record.
  static int Write(openssl::Bio* bio, const char* data, int bytes) {
    Of(bio)->unsent_.append(data, bytes);
    return bytes;
  }

  static long Control(openssl::Bio*, int command, long, void*) {
    return command == openssl::kFlush;
  }
};

// ---- OpenSSL

namespace {

Status Prepare(Opened* opened) {
  const openssl::Functions& f = opened->functions;
  openssl::Context* const context = f.new_context(f.method());
  openssl::BioMethod* const method =
      f.new_bio_method(f.new_bio_type() | openssl::kSourceSink, "a socket");
  const bool ok =
      context != nullptr && method != nullptr &&
      f.control_context(context, openssl::kSetLeastVersion, openssl::kTls13, nullptr) &&
      f.control_context(context, openssl::kSetMostVersion, openssl::kTls13, nullptr) &&
      f.set_cipher_suites(context, kSuite) && f.set_tickets(context, 0) &&
      f.set_bio_read(method, TlsCallbacks::Read) &&
      f.set_bio_write(method, TlsCallbacks::Write) &&
      f.set_bio_control(method, TlsCallbacks::Control);
  if (!ok) {
    return Status::Internal(opened->text + " does not allow TLS 1.3 with " + kSuite +
                            ": see its openssl.cnf");
  }
  f.set_use_session(context, TlsCallbacks::UseSession);
  f.set_find_session(context, TlsCallbacks::FindSession);
  opened->context = context;
  opened->socket_method = method;
  return Status::Ok();
}

}  // namespace

Status OpenTls(const std::string& library, std::string* text) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (g_opened.load() == nullptr) {
    auto opened = std::make_unique<Opened>();
    KHVD_RETURN_IF_ERROR(openssl::Open(library, &opened->functions, &opened->text));
    KHVD_RETURN_IF_ERROR(Prepare(opened.get()));
    g_opened.store(opened.release());
  }
  *text = g_opened.load()->text;
  return Status::Ok();
}

// ---- A session's beginning and end

TlsSession::TlsSession(int socket, const Credentials& credentials)
    : socket_(socket),
      credentials_(credentials),
      // Not cleared: memory that few bytes come through is never touched.
      received_(new char[kBytesAtOnce]) {}

TlsSession::~TlsSession() { OpenSsl().free_connection(connection_); }

Status TlsSession::Open(const std::string& library, int socket, Role role,
                        const Credentials& credentials,
                        std::unique_ptr<TlsSession>* session) {
  std::string text;
  KHVD_RETURN_IF_ERROR(OpenTls(library, &text));
  std::unique_ptr<TlsSession> opened(new TlsSession(socket, credentials));
  KHVD_RETURN_IF_ERROR(opened->Start(role));
  *session = std::move(opened);
  return Status::Ok();
}

Status TlsSession::Start(Role role) {
  connection_ = OpenSsl().new_connection(g_opened.load()->context);
  openssl::Bio* const bio = OpenSsl().new_bio(g_opened.load()->socket_method);
  if (connection_ == nullptr || bio == nullptr) {
    return Status::Internal("OpenSSL has no memory for a connection");
  }
  OpenSsl().set_bio_data(bio, this);
  OpenSsl().set_bio_ready(bio, 1);
  OpenSsl().set_bio(connection_, bio, bio);
  OpenSsl().set_data(connection_, 0, this);
  if (role == Role::kClient) {
    OpenSsl().be_client(connection_);
    // None is trusted: a server that shows a certificate does not have the key.
    OpenSsl().set_verify(connection_, openssl::kVerifyPeer, nullptr);
  } else {
    OpenSsl().be_server(connection_);
  }
  return Status::Ok();
}

openssl::Session* TlsSession::NewSession() const {
  const openssl::Functions& f = OpenSsl();
  openssl::Session* const session = f.new_session();
  if (session == nullptr) return nullptr;
  const openssl::Cipher* const cipher = f.find_cipher(connection_, kSuiteNumber);
  const bool ok =
      cipher != nullptr &&
      f.set_key(session, credentials_.key.data(), credentials_.key.size()) &&
      f.set_cipher(session, cipher) && f.set_version(session, openssl::kTls13);
  if (ok) return session;
  f.free_session(session);
  return nullptr;
}

int64_t TlsSession::Handshake() {
  if (failure_ != 0) return failure_;
  OpenSsl().clear_errors();
  const int result = OpenSsl().shake_hands(connection_);
  const int64_t outcome = result == 1 ? 1 : OutcomeOf(result);
  if (outcome == kEnded) return Fail(kLost, "it was closed");
  // Only the key's owner can begin where an earlier session, the key, has ended.
  if (outcome == 1 && OpenSsl().is_resumed(connection_) != 1) {
    return Fail(kRefused, "TLS: the other end does not have the key");
  }
  if (failure_ != 0 || Flush()) return outcome;
  return failure_ != 0 ? failure_ : kWantsWrite;
}

void TlsSession::EndWriting() {
  if (failure_ != 0 || std::exchange(has_ended_writing_, true)) return;
  OpenSsl().clear_errors();
  OpenSsl().shut_down(connection_);
  Flush();
}

// OpenSSL never wants to write: it may always.
int64_t TlsSession::OutcomeOf(int result) {
  const int error = OpenSsl().error_of(connection_, result);
  if (error == openssl::kErrorWantRead) return kWantsRead;
  if (error == openssl::kErrorZeroReturn) return kEnded;
  if (failure_ != 0) return failure_;
  const char* const reason = OpenSsl().reason(OpenSsl().get_error());
  // OpenSSL has written an alert, for the other end to know.
  Flush();
  const std::string text = reason == nullptr ? "unknown error" : reason;
  return Fail(kRefused, "TLS: " + text);
}

int64_t TlsSession::Fail(int64_t outcome, const std::string& why) {
  failure_ = outcome;
  why_failed_ = why;
  return outcome;
}

void TlsSession::FailFor(int error) {
  error_ = error;
  Fail(kLost, strerror(error));
}

// ---- Reading

int64_t TlsSession::Read(const iovec* pieces, int count) {
  if (failure_ != 0) return failure_;
  OpenSsl().clear_errors();
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    char* to = static_cast<char*>(pieces[i].iov_base);
    size_t left = pieces[i].iov_len;
    while (left > 0) {
      const int most = static_cast<int>(std::min<size_t>(left, INT_MAX));
      const int bytes = OpenSsl().read(connection_, to, most);
      if (bytes <= 0) {
        const int64_t outcome = OutcomeOf(bytes);
        // The cause of the end is found again.
        return total > 0 ? total : outcome;
      }
      to += bytes;
      left -= bytes;
      total += bytes;
    }
  }
  return total;
}

int TlsSession::ReadSocket(openssl::Bio* bio, char* data, int bytes) {
  OpenSsl().clear_bio_flags(bio, openssl::kRead | openssl::kRetry);
  if (received_begin_ == received_end_) {
    const ssize_t count =
        TEMP_FAILURE_RETRY(recv(socket_, received_.get(), kBytesAtOnce, 0));
    if (count < 0 && errno == EAGAIN) {
      OpenSsl().set_bio_flags(bio, openssl::kRead | openssl::kRetry);
      return -1;
    }
    if (count <= 0) {
      // The other end has not said that it ends: it has died, or somebody cut it off.
      if (count < 0) FailFor(errno);
      if (count == 0) Fail(kLost, "it was cut off");
      return static_cast<int>(count);
    }
    received_begin_ = 0;
    received_end_ = count;
  }
  const size_t taken = std::min<size_t>(bytes, received_end_ - received_begin_);
  memcpy(data, received_.get() + received_begin_, taken);
  received_begin_ += taken;
  return static_cast<int>(taken);
}

// ---- Writing

int64_t TlsSession::Write(const iovec* pieces, int count) {
  if (failure_ != 0) return failure_;
  if (taken_ == 0 && !Encrypt(pieces, count)) return failure_;
  if (!Flush()) return failure_ != 0 ? failure_ : kWantsWrite;
  return std::exchange(taken_, 0);
}

// Large pieces are encrypted from where they are. Small ones next to each other share a
// record.
bool TlsSession::Encrypt(const iovec* pieces, int count) {
  OpenSsl().clear_errors();
  char shared[kRecordBytes];
  size_t shared_bytes = 0;
  for (int i = 0; i < count && taken_ < kBytesAtOnce; ++i) {
    const char* const data = static_cast<const char*>(pieces[i].iov_base);
    const size_t bytes = pieces[i].iov_len;
    if (bytes <= kRecordBytes - shared_bytes) {
      memcpy(shared + shared_bytes, data, bytes);
      shared_bytes += bytes;
      continue;
    }
    if (!EncryptNext(shared, std::exchange(shared_bytes, 0))) return false;
    // A larger piece ends this round; its rest waits for the next one.
    if (!EncryptNext(data, std::min<size_t>(bytes, kBytesAtOnce))) return false;
  }
  return EncryptNext(shared, shared_bytes);
}

bool TlsSession::EncryptNext(const void* data, size_t bytes) {
  if (bytes == 0) return true;
  records_ += bytes / kRecordBytes + 1;
  if (records_ > kRecordsPerKey) {
    if (OpenSsl().update_key(connection_, openssl::kUpdateNotRequested) != 1) {
      Fail(kRefused, "TLS: there is no new key");
      return false;
    }
    records_ = 0;
  }
  const int written = OpenSsl().write(connection_, data, static_cast<int>(bytes));
  if (written <= 0) OutcomeOf(written);
  if (written > 0) taken_ += written;
  return written > 0;
}

// Returns whether the socket has taken everything.
bool TlsSession::Flush() {
  while (sent_ < unsent_.size()) {
    const ssize_t count = TEMP_FAILURE_RETRY(
        send(socket_, unsent_.data() + sent_, unsent_.size() - sent_, MSG_NOSIGNAL));
    if (count < 0) {
      if (errno != EAGAIN) FailFor(errno);
      return false;
    }
    sent_ += count;
  }
  unsent_.clear();
  sent_ = 0;
  return true;
}

}  // namespace keras_hvd

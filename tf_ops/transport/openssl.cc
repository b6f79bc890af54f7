#include "tf_ops/transport/openssl.h"

#include "tf_ops/transport/dynamic_library.h"

namespace keras_hvd::openssl {
namespace {

constexpr const char* kNames[] = {"libssl.so.3", "libssl.so.1.1", "libssl.so"};

// 1.1.1b: earlier ones refuse the 33rd new key of a connection.
constexpr unsigned long kLeastVersion = 0x1010102f;

constexpr char kAdvice[] =
    "Install OpenSSL 1.1.1b or newer (Debian and Ubuntu: libssl3, Fedora and RHEL: "
    "openssl-libs), or name its libssl in KERAS_HVD_SSL_LIBRARY";

Status OpenFirst(const std::string& name, DynamicLibrary* library) {
  if (!name.empty()) {
    return DynamicLibrary::Open(name, "there is no " + name + ". " + kAdvice, library);
  }
  Status status;
  std::string names;
  for (const char* each : kNames) {
    names += names.empty() ? each : std::string(", ") + each;
    const std::string missing =
        "there is none of " + names + " on the library path. " + kAdvice;
    status = DynamicLibrary::Open(each, missing, library);
    if (status.ok() || status.message != missing) return status;
  }
  return status;
}

Status Find(const DynamicLibrary& library, Functions* functions) {
  Status status;
#define KERAS_HVD_FIND(member, symbol, result, parameters) \
  if (status.ok()) status = library.Find(symbol, &functions->member);
  KERAS_HVD_OPENSSL_FUNCTIONS(KERAS_HVD_FIND)
#undef KERAS_HVD_FIND
  if (!status.ok()) status.message += std::string(", so it has no TLS 1.3. ") + kAdvice;
  return status;
}

}  // namespace

Status Open(const std::string& name, Functions* functions, std::string* text) {
  DynamicLibrary library;
  KHVD_RETURN_IF_ERROR(OpenFirst(name, &library));
  KHVD_RETURN_IF_ERROR(Find(library, functions));
  *text = std::string(functions->version_text(0)) + " (" + library.path() + ")";
  if (functions->version_number() < kLeastVersion) {
    return Status::Internal(*text + " is too old. " + kAdvice);
  }
  // Otherwise OpenSSL would be taken down at exit while an engine still runs.
  if (functions->start(kNoAtExit, nullptr) == 1) return Status::Ok();
  return Status::Internal(*text + " does not start");
}

}  // namespace keras_hvd::openssl

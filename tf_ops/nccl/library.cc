#include "tf_ops/nccl/library.h"

#include "tf_ops/transport/dynamic_library.h"

namespace keras_hvd::nccl {
namespace {

constexpr char kName[] = "libnccl.so.2";

std::string Missing(const std::string& path) {
  if (!path.empty()) return "there is no NCCL in " + path;
  return std::string("there is no ") + kName +
         " in the library path; pip install nvidia-nccl-cu12 brings one, and "
         "KERAS_HVD_NCCL_LIBRARY may name another";
}

Status CheckVersion(int version, const std::string& path) {
  if (version >= kOldestVersion) return Status::Ok();
  return Status::Internal("NCCL " + VersionText(version) + " (" + path +
                          ") is too old: keras_hvd needs " +
                          VersionText(kOldestVersion) + " or later");
}

Status Find(const DynamicLibrary& library, Functions* functions) {
  Status status;
#define KERAS_HVD_FIND(member, symbol, result, parameters) \
  if (status.ok()) status = library.Find(symbol, &functions->member);
  KERAS_HVD_NCCL_FUNCTIONS(KERAS_HVD_FIND)
#undef KERAS_HVD_FIND
  return status;
}

std::string WithoutEnd(std::string text) {
  const size_t last = text.find_last_not_of(" \n.");
  text.resize(last == std::string::npos ? 0 : last + 1);
  return text;
}

}  // namespace

// Versions before 2.9 have two digits fewer: 2804 is 2.8.4.
std::string VersionText(int version) {
  const int base = version < 10000 ? 1000 : 10000;
  return std::to_string(version / base) + "." + std::to_string(version % base / 100) +
         "." + std::to_string(version % 100);
}

Status Library::Open(const std::string& path, std::shared_ptr<const Library>* library) {
  DynamicLibrary found;
  // PyTorch, for instance, brings an NCCL of its own.
  KHVD_RETURN_IF_ERROR(DynamicLibrary::OpenBesideOthers(
      path.empty() ? kName : path, Missing(path), "ncclGetVersion", &found));
  std::shared_ptr<Library> opened(new Library());
  Functions& functions = opened->functions_;
  // An old library lacks functions. Its version is the better thing to report.
  KHVD_RETURN_IF_ERROR(found.Find("ncclGetVersion", &functions.version));
  const Result result = functions.version(&opened->version_);
  if (result != Result::kSuccess) {
    return Status::Internal("ncclGetVersion of " + found.path() + " failed: error " +
                            std::to_string(static_cast<int>(result)));
  }
  KHVD_RETURN_IF_ERROR(CheckVersion(opened->version_, found.path()));
  KHVD_RETURN_IF_ERROR(Find(found, &functions));
  opened->text_ = "NCCL " + VersionText(opened->version_) + " (" + found.path() + ")";
  *library = std::move(opened);
  return Status::Ok();
}

Status Library::Check(Result result, const char* name, Comm comm) const {
  if (result == Result::kSuccess || result == Result::kInProgress) return Status::Ok();
  std::string text = "NCCL failed in " + std::string(name) + ": " +
                     WithoutEnd(functions_.error_text(result));
  const char* last = functions_.last_error(comm);
  const std::string more = WithoutEnd(last != nullptr ? last : "");
  if (!more.empty()) text += ": " + more;
  return Status::Internal(text +
                          ". With NCCL_DEBUG=WARN in the environment it says "
                          "more");
}

}  // namespace keras_hvd::nccl

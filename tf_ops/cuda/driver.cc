#include "tf_ops/cuda/driver.h"

#include <cstdlib>

#include "tf_ops/transport/dynamic_library.h"

namespace keras_hvd::cuda {
namespace {

constexpr char kName[] = "libcuda.so.1";

std::string Missing(const std::string& path) {
  if (!path.empty()) return "there is no CUDA driver in " + path;
  return std::string("there is no ") + kName + ": no NVIDIA driver is installed here";
}

Status Find(const DynamicLibrary& library, Functions* functions) {
  Status status;
#define KERAS_HVD_FIND(member, symbol, result, parameters) \
  if (status.ok()) status = library.Find(symbol, &functions->member);
  KERAS_HVD_CUDA_FUNCTIONS(KERAS_HVD_FIND)
#undef KERAS_HVD_FIND
  if (!status.ok()) status.message += ", which keras_hvd needs: update the driver";
  return status;
}

// For an error that the user's own settings may explain.
std::string VisibleDevices() {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return "";
  return "; CUDA_VISIBLE_DEVICES, which hides all others, is \"" +
         std::string(visible) + "\"";
}

std::string TextOf(int version, const std::string& path, int devices) {
  return "CUDA " + std::to_string(version / 1000) + "." +
         std::to_string(version % 1000 / 10) + " (" + path + "), " +
         std::to_string(devices) + (devices == 1 ? " device" : " devices");
}

}  // namespace

Status Driver::Open(const std::string& path, std::shared_ptr<const Driver>* driver) {
  DynamicLibrary library;
  KHVD_RETURN_IF_ERROR(
      DynamicLibrary::Open(path.empty() ? kName : path, Missing(path), &library));
  std::shared_ptr<Driver> opened(new Driver());
  KHVD_RETURN_IF_ERROR(Find(library, &opened->functions_));
  KHVD_RETURN_IF_ERROR(opened->Start(library.path()));
  *driver = std::move(opened);
  return Status::Ok();
}

Status Driver::Start(const std::string& path) {
  Status status = Check(functions_.init(0), "cuInit");
  int version = 0, devices = 0;
  if (status.ok()) {
    status = Check(functions_.driver_version(&version), "cuDriverGetVersion");
  }
  if (status.ok()) {
    status = Check(functions_.device_count(&devices), "cuDeviceGetCount");
  }
  if (status.ok() && devices == 0) {
    status = Status::Internal("the CUDA driver finds no GPU");
  }
  if (!status.ok()) {
    status.message += " (" + path + ")" + VisibleDevices();
    return status;
  }
  text_ = TextOf(version, path, devices);
  return status;
}

Status Driver::Check(Result result, const char* name) const {
  if (result == Result::kSuccess) return Status::Ok();
  const char* error_name = nullptr;
  const char* text = nullptr;
  functions_.error_name(result, &error_name);
  functions_.error_text(result, &text);
  std::string message = "CUDA failed in " + std::string(name) + ": ";
  message += error_name != nullptr
                 ? error_name
                 : "error " + std::to_string(static_cast<int>(result));
  if (text != nullptr) message += std::string(", ") + text;
  return Status::Internal(std::move(message));
}

}  // namespace keras_hvd::cuda

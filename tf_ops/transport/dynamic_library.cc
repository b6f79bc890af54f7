#include "tf_ops/transport/dynamic_library.h"

#include <dlfcn.h>
#include <link.h>

namespace keras_hvd {
namespace {

std::string LastError() {
  const char* text = dlerror();
  return text != nullptr ? text : "the dynamic linker gives no reason";
}

// The linker uses the same text when a dependency is missing, but with another name.
bool IsMissing(const std::string& name, const std::string& error) {
  return error.rfind(name + ": cannot open shared object file: No such file", 0) == 0;
}

std::string PathOf(void* handle, const std::string& name) {
  link_map* map = nullptr;
  const bool known = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && *map->l_name != '\0';
  return known ? map->l_name : name;
}

bool IsOpen(const std::string& name) {
  void* const handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle != nullptr) dlclose(handle);
  return handle != nullptr;
}

// By a preloaded allocator, for instance, or a sanitizer's.
bool IsMallocReplaced() {
  void* const libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
  if (libc == nullptr) return true;
  const bool is_replaced = dlsym(libc, "malloc") != dlsym(RTLD_DEFAULT, "malloc");
  dlclose(libc);
  return is_replaced;
}

}  // namespace

Status DynamicLibrary::Open(const std::string& name, const std::string& missing,
                            DynamicLibrary* library) {
  return OpenWith(name, 0, missing, library);
}

Status DynamicLibrary::OpenBesideOthers(const std::string& name,
                                        const std::string& missing, const char* symbol,
                                        DynamicLibrary* library) {
  // TensorFlow for GPUs has such functions too, which call those of this library.
  const bool has_other = dlsym(RTLD_DEFAULT, symbol) != nullptr && !IsOpen(name);
  // With another malloc, it would free the memory of realpath(), for instance, by the C
  // library's free().
  const int flags = has_other && !IsMallocReplaced() ? RTLD_DEEPBIND : 0;
  return OpenWith(name, flags, missing, library);
}

Status DynamicLibrary::OpenWith(const std::string& name, int flags,
                                const std::string& missing, DynamicLibrary* library) {
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
  if (handle == nullptr) {
    const std::string error = LastError();
    if (IsMissing(name, error)) return Status::Internal(missing);
    return Status::Internal(name + " cannot be opened: " + error);
  }
  library->handle_ = handle;
  library->path_ = PathOf(handle, name);
  return Status::Ok();
}

Status DynamicLibrary::FindAddress(const char* symbol, void** address) const {
  *address = dlsym(handle_, symbol);
  if (*address != nullptr) return Status::Ok();
  return Status::Internal("there is no function " + std::string(symbol) + " in " +
                          path_);
}

}  // namespace keras_hvd

#include "tf_ops/transport/control_groups.h"

#include <fstream>

namespace keras_hvd {
namespace {

bool Names(const std::string& controllers, const std::string& controller) {
  return ("," + controllers + ",").find("," + controller + ",") != std::string::npos;
}

}  // namespace

std::vector<std::string> ControlGroups(const std::string& controller,
                                       const std::string& groups_file,
                                       const std::string& mount) {
  // If a container hides its group's own path, the root that it sees is its group.
  std::vector<std::string> folders = {mount, mount + "/" + controller};
  std::ifstream groups(groups_file);
  std::string number, controllers, group;
  while (std::getline(groups, number, ':') && std::getline(groups, controllers, ':') &&
         std::getline(groups, group)) {
    std::vector<std::string> mounts;
    if (number == "0") mounts = {mount, mount + "/unified"};
    if (Names(controllers, controller)) {
      mounts = {mount + "/" + controller, mount + "/" + controllers};
    }
    for (const std::string& each : mounts) {
      folders.push_back(each);
      // "/a/b", "/a".
      for (std::string inner = group; inner.size() > 1;
           inner.resize(inner.rfind('/'))) {
        folders.push_back(each + inner);
      }
    }
  }
  return folders;
}

}  // namespace keras_hvd

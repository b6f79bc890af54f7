#include "tf_ops/coordination/autotune_log.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

namespace keras_hvd {
namespace {

constexpr char kColumns[] =
    "fusion_bytes,window_bytes,small_bytes,spin_microseconds,halving_hosts,"
    "bytes_per_second,stage";
// A log of an earlier version of keras_hvd is replaced.
constexpr char kEarlier[] = "keras_hvd autotune 1: ";

const char* Name(Autotune::Stage stage) {
  switch (stage) {
    case Autotune::Stage::kWarmup: return "warmup";
    case Autotune::Stage::kSearch: return "search";
    default: return "final";
  }
}

std::string Values(const Tuning& tuning) {
  std::string text;
  for (const int64_t value :
       {tuning.fusion_bytes, tuning.window_bytes, tuning.small_bytes,
        tuning.spin_microseconds, tuning.halving_hosts}) {
    text += std::to_string(value) + ",";
  }
  return text;
}

bool ParseBest(const std::string& line, Tuning* tuning) {
  int end = 0;
  const int fields =
      sscanf(line.c_str(),
             "%" SCNd64 ",%" SCNd64 ",%" SCNd64 ",%" SCNd64 ",%" SCNd64 ",,best%n",
             &tuning->fusion_bytes, &tuning->window_bytes, &tuning->small_bytes,
             &tuning->spin_microseconds, &tuning->halving_hosts, &end);
  return fields == 5 && end == static_cast<int>(line.size()) && IsPossible(*tuning);
}

Status Unwritable(const std::string& path) {
  return Status::InvalidArgument("the autotune log '" + path +
                                 "' cannot be written: " + strerror(errno));
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

}  // namespace

Status ReadAutotuneLog(int ranks, AutotuneOptions* options) {
  const std::string& path = options->log;
  if (access(FolderOf(path).c_str(), W_OK | X_OK) != 0) return Unwritable(path);
  if (access(path.c_str(), F_OK) != 0) return Status::Ok();
  std::ifstream file(path);
  std::string head, columns, best;
  // An empty file, as mktemp makes one, has nothing to lose.
  file.peek();
  if (file.eof()) return Status::Ok();
  std::getline(file, head);
  if (head.rfind(kEarlier, 0) == 0) return Status::Ok();
  std::getline(file, columns);
  std::getline(file, best);
  int ranks_then = 0, end = 0;
  char state[10] = "";
  const int fields = sscanf(head.c_str(), "keras_hvd autotune 2: ranks=%d state=%9s%n",
                            &ranks_then, state, &end);
  const bool is_result = strcmp(state, "result") == 0;
  Tuning tuning;
  if (!file || fields != 2 || end != static_cast<int>(head.size()) ||
      (!is_result && strcmp(state, "search") != 0) || columns != kColumns ||
      !ParseBest(best, &tuning)) {
    return Status::InvalidArgument(
        "the autotune log '" + path +
        "' exists but is not a keras_hvd autotune log: remove it, or give another "
        "name");
  }
  if (ranks_then != ranks) return Status::Ok();
  options->start = tuning;
  options->known =
      is_result ? AutotuneOptions::Known::kResult : AutotuneOptions::Known::kBest;
  return Status::Ok();
}

Status WriteAutotuneLog(const std::string& path, int ranks, const Autotune& autotune) {
  std::string text = "keras_hvd autotune 2: ranks=" + std::to_string(ranks) +
                     " state=" + (autotune.has_result() ? "result" : "search") + "\n" +
                     kColumns + "\n" + Values(autotune.best()) + ",best\n";
  for (const Autotune::Sample& sample : autotune.samples()) {
    text += Values(sample.tuning) +
            std::to_string(static_cast<int64_t>(sample.bytes_per_second)) + "," +
            Name(sample.stage) + "\n";
  }
  const std::string part = path + ".part";
  errno = 0;
  std::ofstream file(part, std::ios::trunc);
  file << text;
  file.close();
  if (file && rename(part.c_str(), path.c_str()) == 0) return Status::Ok();
  const Status status = Unwritable(path);
  unlink(part.c_str());
  return status;
}

}  // namespace keras_hvd

#include "tf_ops/timeline/recording_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace keras_hvd {
namespace {

constexpr char kMagic[] = "khvdrec1";
constexpr size_t kHeaderBytes = 4096;
constexpr size_t kSums = sizeof(RecordingFile::Stretch) / sizeof(double);
constexpr char kOthers[] = "(all other tensors)";

static_assert(sizeof(RecordingFile::Header) <= kHeaderBytes);

// The values of a stretch add up, except for its begin and end, which come first.
void AddTo(double* row, const double* other, size_t numbers) {
  if (row[2] == 0) row[0] = other[0];
  row[1] = other[1];
  for (size_t i = 2; i < numbers; ++i) row[i] += other[i];
}

}  // namespace

RecordingFile::~RecordingFile() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

Status RecordingFile::Open(const std::string& path, int size, int64_t started) {
  const int in_column = (size + kMostColumns - 1) / kMostColumns;
  const int columns = (size + in_column - 1) / in_column;
  numbers_ = kSums + 2 * static_cast<size_t>(columns);
  const size_t tensors_at = kHeaderBytes;
  const size_t events_at = tensors_at + kTensors * sizeof(Tensor);
  const size_t totals_at = events_at + kEvents * sizeof(Event);
  bytes_ = totals_at + (1 + 2 * kStretches) * numbers_ * sizeof(double);

  const auto failure = [&path](int error) {
    return Status::InvalidArgument("the recording '" + path +
                                   "' cannot be written: " + strerror(error));
  };
  const int descriptor =
      open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor == -1) return failure(errno);
  // A disk that is full later would end this process.
  const int error = posix_fallocate(descriptor, 0, static_cast<off_t>(bytes_));
  void* const memory = error != 0 ? MAP_FAILED
                                  : mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                                         MAP_SHARED, descriptor, 0);
  const int mapping_error = errno;
  close(descriptor);
  if (memory == MAP_FAILED) return failure(error != 0 ? error : mapping_error);

  memory_ = static_cast<char*>(memory);
  tensors_ = memory_ + tensors_at;
  events_ = memory_ + events_at;
  totals_ = reinterpret_cast<double*>(memory_ + totals_at);
  tables_ = totals_ + numbers_;
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  Header& own = header();
  own.size = size;
  own.columns = columns;
  own.ranks_in_column = in_column;
  own.stretches = kStretches;
  own.tensor_room = kTensors;
  own.event_room = kEvents;
  own.started = started;
  own.begin = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  own.tables[0].steps = own.tables[1].steps = 1;
  int64_t magic;
  memcpy(&magic, kMagic, sizeof(magic));
  own.magic.store(magic, std::memory_order_release);
  return Status::Ok();
}

double* RecordingFile::Row(int64_t table, int64_t stretch) const {
  return tables_ + static_cast<size_t>(table * kStretches + stretch) * numbers_;
}

void RecordingFile::AddStep(const Step& step) {
  Header& own = header();
  std::vector<double> added(numbers_);
  memcpy(added.data(), &step.sums, sizeof(step.sums));
  // Of ranks that share a column, the one with most counts.
  for (size_t rank = 0; rank < step.waits.size(); ++rank) {
    const size_t column = rank / static_cast<size_t>(own.ranks_in_column);
    double* const waits = added.data() + kSums + column;
    double* const waited_for = waits + own.columns;
    *waits = std::max(*waits, step.waits[rank]);
    *waited_for = std::max(*waited_for, step.waited_for[rank]);
  }
  AddTo(totals_, added.data(), numbers_);
  const auto is_full = [&own, this] {
    const auto& table = own.tables[own.active];
    if (table.stretches == 0) return true;
    return Row(own.active, table.stretches - 1)[2] >= static_cast<double>(table.steps);
  };
  if (is_full() && own.tables[own.active].stretches == kStretches) Merge();
  auto& table = own.tables[own.active];
  const bool is_new = is_full();
  const int64_t last = table.stretches - (is_new ? 0 : 1);
  double* const row = Row(own.active, last);
  if (is_new) std::fill_n(row, numbers_, 0);
  AddTo(row, added.data(), numbers_);
  if (is_new) table.stretches.store(last + 1, std::memory_order_release);
}

void RecordingFile::Merge() {
  Header& own = header();
  const int64_t from = own.active, to = 1 - from;
  for (int64_t i = 0; i < kStretches / 2; ++i) {
    double* const row = Row(to, i);
    std::fill_n(row, numbers_, 0);
    AddTo(row, Row(from, 2 * i), numbers_);
    AddTo(row, Row(from, 2 * i + 1), numbers_);
  }
  own.tables[to].stretches = kStretches / 2;
  own.tables[to].steps = 2 * own.tables[from].steps;
  own.active.store(to, std::memory_order_release);
}

RecordingFile::Tensor* RecordingFile::AddTensor(std::string_view name) {
  Header& own = header();
  auto* const tensors = reinterpret_cast<Tensor*>(tensors_);
  const int64_t used = own.tensors;
  if (used == kTensors) return &tensors[kTensors - 1];
  const bool is_last = used == kTensors - 1;
  Write(is_last ? kOthers : name, tensors[used].name, Tensor::kLongestName);
  own.tensors.store(used + 1, std::memory_order_release);
  return &tensors[used];
}

RecordingFile::Event* RecordingFile::AddEvent() {
  Header& own = header();
  const int64_t used = own.events;
  if (used == kEvents) {
    own.events_left_out += 1;
    return nullptr;
  }
  own.events.store(used + 1, std::memory_order_release);
  return reinterpret_cast<Event*>(events_) + used;
}

// The end of a text that does not fit is left out.
void RecordingFile::Write(std::string_view text, char* to, size_t room) {
  const size_t length = std::min(text.size(), room);
  memcpy(to, text.data(), length);
  memset(to + length, 0, room - length);
}

}  // namespace keras_hvd

#include "tf_ops/timeline/timeline_writer.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <ctime>

#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/collectives/phase_recorder.h"

namespace keras_hvd {
namespace {

// The prefixes of a collective's name: for the backend that moves the bytes, and for
// the host's work for GPU tensors.
constexpr char kBackend[] = "SHARED_MEMORY_";
constexpr char kEnqueuing[] = "ENQUEUE_";
constexpr const char* kPhaseNames[kCollectivePhases] = {
    "", "COPY_IN", "WAIT_FOR_RANKS", "REDUCE", "COPY_OUT", "EXCHANGE"};
// Names that end with an underscore precede the collective's own name.
constexpr const char* kGpuPhaseNames[kGpuPhases] = {
    "WAIT_FOR_INPUTS", "NCCL_", "COPY_TO_HOST", kBackend, "COPY_TO_GPU", "COPY_ON_GPU"};
// Limit for a tensor's name; the rest is left out.
constexpr size_t kLongestName = 1024;
// Ranks whose arrivals fit in a line. Of more ranks, the last to arrive are shown.
constexpr size_t kMostArrivals = 64;
// Names that a program invents as it runs must not fill the memory.
constexpr size_t kMostNames = 16384;

std::string UpperCase(const char* text) {
  std::string upper = text;
  for (char& letter : upper) letter = static_cast<char>(toupper(letter));
  return upper;
}

// The bytes of the UTF-8 character at the start of `text`; 0 if there is none.
size_t CharacterBytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) return 1;
  const size_t bytes = byte(0) >= 0xF0 ? 4 : byte(0) >= 0xE0 ? 3 : 2;
  if (byte(0) < 0xC2 || byte(0) > 0xF4 || text.size() < bytes) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  return bytes;
}

// Returns `text` as it appears in a JSON string.
std::string Escape(std::string_view text) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string escaped;
  while (!text.empty() && escaped.size() < kLongestName) {
    const size_t bytes = CharacterBytes(text);
    const char first = text.front();
    if (bytes == 0) {
      escaped += '?';
    } else if (first == '"' || first == '\\') {
      escaped += {'\\', first};
    } else if (static_cast<unsigned char>(first) < 0x20) {
      escaped += {'\\', 'u', '0', '0', kDigits[first >> 4], kDigits[first & 15]};
    } else {
      escaped += text.substr(0, bytes);
    }
    text.remove_prefix(std::max<size_t>(bytes, 1));
  }
  return text.empty() ? escaped : escaped + "...";
}

void AppendInteger(int64_t value, std::string* to) {
  char digits[24];
  to->append(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr);
}

// Writes nanoseconds as microseconds.
void AppendMicroseconds(int64_t nanoseconds, std::string* to) {
  AppendInteger(nanoseconds / 1000, to);
  const int64_t rest = nanoseconds % 1000;
  *to += {'.', static_cast<char>('0' + rest / 100),
          static_cast<char>('0' + rest / 10 % 10), static_cast<char>('0' + rest % 10)};
}

// The bytes of a request in its batch, where requests lie one after the other.
int64_t BytesInBatch(const Description& description) {
  int64_t bytes = 0;
  for (const TensorDescription& tensor : description.tensors) {
    bytes += PaddedBytes(Elements(tensor) * Bytes(tensor.dtype));
  }
  return bytes;
}

}  // namespace

TimelineWriter::TimelineWriter(TimelineFile* file, const JobState* job, int64_t start)
    : file_(*file), job_(*job), start_(start) {
  const int size = job->size();
  BeginLine("process_name", "M");
  line_ += ",\"args\":{\"name\":\"keras_hvd, rank 0 of ";
  AppendInteger(size, &line_);
  EndLine("\"}}");
  // The wall-clock time at `ts` 0, in seconds, for comparing logs.
  BeginLine("start", "M");
  line_ += ",\"args\":{\"time\":";
  AppendInteger(time(nullptr), &line_);
  AddNumber("size", size);
  EndLine("}}");
}

void TimelineWriter::Add(const TimelineRecord& record) {
  switch (record.type) {
    case TimelineRecord::Type::kDecision:
      // Older ones are there if a recording began before the timeline.
      if (record.times[0] < start_) return;
      batches_[record.batch].decided = record.times[0];
      batches_[record.batch].runs_here = record.number != 0;
      return;
    case TimelineRecord::Type::kArrivals: return AddArrivals(record);
    case TimelineRecord::Type::kRequest: return WriteNegotiation(record);
    case TimelineRecord::Type::kBegin: return WriteQueue(record);
    case TimelineRecord::Type::kPhase: return WritePhase(record);
    case TimelineRecord::Type::kEnd: return WriteCollective(record);
    case TimelineRecord::Type::kMissing: return WriteMissing(record);
    case TimelineRecord::Type::kGpuPhase: return WriteGpuPhase(record);
    case TimelineRecord::Type::kBatchElsewhere: return WriteBatchElsewhere(record);
    case TimelineRecord::Type::kCycle:
      BeginLine("CYCLE_START", "i");
      AddTime("ts", record.times[0] - start_);
      return EndLine(",\"s\":\"g\"}");
  }
}

void TimelineWriter::AddSkipped(int64_t time, int64_t requests, int64_t phases) {
  BeginLine("NOT_RECORDED", "i");
  AddTime("ts", time - start_);
  line_ += ",\"s\":\"g\",\"args\":{\"requests\":";
  AppendInteger(requests, &line_);
  AddNumber("phases", phases);
  EndLine("}}");
}

void TimelineWriter::AddArrivals(const TimelineRecord& record) {
  for (int i = 0; i < record.number; ++i) {
    arrivals_.emplace_back(record.times[i], record.ranks[i]);
  }
}

// From the first rank's submission to the decision, with each rank's submission time.
void TimelineWriter::WriteNegotiation(const TimelineRecord& record) {
  std::vector<std::pair<int64_t, int>> arrivals = std::move(arrivals_);
  arrivals_.clear();
  std::sort(arrivals.begin(), arrivals.end());
  const auto batch = batches_.find(record.batch);
  if (batch == batches_.end() || arrivals.empty()) return;
  const Description& description = *record.description;
  const int64_t first = arrivals.front().first;
  if (first < start_) return;
  const int row = FindRow(description, first);
  const Kind kind = description.kind;
  BeginSpan("NEGOTIATE_" + UpperCase(Name(kind)), row, first, batch->second.decided);
  BeginArguments(record.batch);
  line_ += ",\"ready\":{";
  const size_t left_out =
      arrivals.size() > kMostArrivals ? arrivals.size() - kMostArrivals : 0;
  for (size_t i = left_out; i < arrivals.size(); ++i) {
    line_ += i == left_out ? "\"" : ",\"";
    AppendInteger(arrivals[i].second, &line_);
    line_ += "\":";
    AppendMicroseconds(arrivals[i].first - first, &line_);
  }
  EndLine("}}}");

  rows_[row].taken_until = batch->second.decided;
  if (!batch->second.runs_here) return;
  rows_[row].is_taken = true;
  batch->second.on_gpu = description.on_gpu;
  const int64_t begin = batch->second.bytes;
  if (kind == Kind::kAllreduce) batch->second.bytes += BytesInBatch(description);
  const int64_t end = kind == Kind::kAllreduce ? batch->second.bytes : INT64_MAX;
  // Those of an allgather are not known.
  const int64_t size = std::max<int64_t>(description.bytes(), 0);
  batch->second.requests.push_back({row, kind, begin, end, size});
}

void TimelineWriter::WriteQueue(const TimelineRecord& record) {
  // Batches run in the order of their numbers, so the end of an earlier one was lost.
  while (!batches_.empty() && batches_.begin()->first < record.batch) {
    Release(batches_.begin()->second, record.times[0]);
    batches_.erase(batches_.begin());
  }
  const auto batch = batches_.find(record.batch);
  if (batch == batches_.end()) return;
  batch->second.began = record.times[0];
  for (const Request& request : batch->second.requests) {
    BeginSpan("QUEUE", request.row, batch->second.decided, record.times[0]);
    BeginArguments(record.batch);
    EndLine("}}");
  }
}

// In the rows of the requests that the bytes belong to.
void TimelineWriter::WritePhase(const TimelineRecord& record) {
  const auto batch = batches_.find(record.batch);
  if (batch == batches_.end()) return;
  for (const Request& request : batch->second.requests) {
    if (request.end <= record.times[2] || record.times[3] <= request.begin) continue;
    BeginSpan(kPhaseNames[record.number], request.row, record.times[0],
              record.times[1]);
    BeginArguments(record.batch);
    EndLine("}}");
  }
}

void TimelineWriter::WriteCollective(const TimelineRecord& record) {
  const auto batch = batches_.find(record.batch);
  if (batch == batches_.end()) return;
  const int64_t requests = static_cast<int64_t>(batch->second.requests.size());
  const std::string what = batch->second.on_gpu ? kEnqueuing : kBackend;
  for (const Request& request : batch->second.requests) {
    BeginSpan(what + UpperCase(Name(request.kind)), request.row, batch->second.began,
              record.times[0]);
    BeginArguments(record.batch);
    AddNumber("requests", requests);
    AddNumber("bytes", request.size);
    if (record.number == 0) line_ += ",\"failed\":true";
    EndLine("}}");
  }
  Release(batch->second, record.times[0]);
  batches_.erase(batch);
}

// For a negotiation so long that the job may end first.
void TimelineWriter::WriteMissing(const TimelineRecord& record) {
  const int row = FindRow(*record.description, record.times[0]);
  BeginLine("WAITING_FOR_RANK", "i");
  AddNumber("tid", row);
  AddTime("ts", record.times[1] - start_);
  line_ += ",\"s\":\"t\",\"args\":{\"rank\":";
  AppendInteger(record.number, &line_);
  AddTime("since", record.times[0] - start_);
  EndLine("}}");
}

// In stream order. Two references for the GPU's clock do not agree to the last
// microsecond.
void TimelineWriter::WriteGpuPhase(const TimelineRecord& record) {
  if (gpu_row_ < 0) gpu_row_ = NewOtherRow(kGpu, "GPU of rank 0", "collectives");
  int64_t& reached = rows_[gpu_row_].taken_until;
  const int64_t begin = std::max(record.times[0], reached);
  const int64_t end = std::max(record.times[1], begin);
  reached = end;
  const Description& description = *record.description;
  std::string name = kGpuPhaseNames[record.number];
  if (name.back() == '_') name += UpperCase(Name(description.kind));
  BeginSpan(name, gpu_row_, begin, end, kGpu);
  BeginArguments(record.batch);
  line_ += ',';
  AddTensors(record);
  if (record.number == static_cast<int32_t>(GpuPhase::kWaitForInputs)) {
    AddTime("enqueued", begin - record.times[2]);
  }
  AddTime("within", record.times[3]);
  EndLine("}}");
}

// In the order in which the host has carried them out. The estimate of the messages'
// delay changes by microseconds.
void TimelineWriter::WriteBatchElsewhere(const TimelineRecord& record) {
  const auto [known, is_new] = host_rows_.try_emplace(record.number, 0);
  if (is_new) {
    const std::string leader = Escape(job_.Describe(record.number));
    known->second = NewOtherRow(kOtherHosts, "other hosts", leader);
  }
  int64_t& reached = rows_[known->second].taken_until;
  const int64_t begin = std::max(record.times[0], reached);
  const int64_t end = std::max(record.times[1], begin);
  reached = end;
  BeginSpan(UpperCase(Name(record.description->kind)), known->second, begin, end,
            kOtherHosts);
  line_ += ",\"args\":{";
  AddTensors(record);
  EndLine("}}");
}

int TimelineWriter::NewOtherRow(int process, const std::string& process_name,
                                const std::string& name) {
  const int row = static_cast<int>(rows_.size());
  rows_.push_back({true, start_});
  BeginLine("process_name", "M", process);
  EndLine(",\"args\":{\"name\":\"" + process_name + "\"}}");
  BeginLine("thread_name", "M", process);
  AddNumber("tid", row);
  EndLine(",\"args\":{\"name\":\"" + name + "\"}}");
  return row;
}

void TimelineWriter::AddTensors(const TimelineRecord& record) {
  line_ += "\"tensors\":\"" + Escape(record.description->name);
  if (record.ranks[0] > 1) {
    line_ += " and " + std::to_string(record.ranks[0] - 1) + " more";
  }
  line_ += '"';
}

void TimelineWriter::Release(const Batch& batch, int64_t time) {
  for (const Request& request : batch.requests) rows_[request.row] = {false, time};
}

// Finds a row of this name that is free from `from` on.
int TimelineWriter::FindRow(const Description& description, int64_t from) {
  if (rows_of_.size() >= kMostNames) rows_of_.clear();
  std::vector<int>& rows = rows_of_[{description.process_set, description.name}];
  for (const int row : rows) {
    if (!rows_[row].is_taken && rows_[row].taken_until <= from) return row;
  }
  rows.push_back(NewRow(description, rows.size()));
  return rows.back();
}

int TimelineWriter::NewRow(const Description& description, size_t same_name) {
  const int row = static_cast<int>(rows_.size());
  rows_.emplace_back();
  BeginLine("thread_name", "M");
  AddNumber("tid", row);
  std::string name = Escape(description.name);
  if (description.process_set != 0) {
    name += " (process set " + std::to_string(description.process_set) + ")";
  }
  line_ += ",\"args\":{\"name\":\"" + name;
  if (same_name > 0) {
    line_ += " #" + std::to_string(same_name + 1) + "\",\"tensor\":\"" + name;
  }
  EndLine("\"}}");
  return row;
}

// ---- Lines

void TimelineWriter::BeginLine(std::string_view name, const char* type, int process) {
  line_ = "{\"name\":\"";
  line_ += name;
  line_ += "\",\"ph\":\"";
  line_ += type;
  line_ += "\",\"pid\":";
  AppendInteger(process, &line_);
}

void TimelineWriter::BeginSpan(std::string_view name, int row, int64_t begin,
                               int64_t end, int process) {
  BeginLine(name, "X", process);
  AddNumber("tid", row);
  AddTime("ts", begin - start_);
  AddTime("dur", end - begin);
}

void TimelineWriter::AddNumber(std::string_view field, int64_t number) {
  line_ += ",\"";
  line_ += field;
  line_ += "\":";
  AppendInteger(number, &line_);
}

void TimelineWriter::AddTime(std::string_view field, int64_t time) {
  line_ += ",\"";
  line_ += field;
  line_ += "\":";
  AppendMicroseconds(std::max<int64_t>(time, 0), &line_);
}

void TimelineWriter::BeginArguments(uint64_t batch) {
  line_ += ",\"args\":{\"batch\":";
  AppendInteger(static_cast<int64_t>(batch), &line_);
}

void TimelineWriter::EndLine(std::string_view end) {
  line_ += end;
  file_.Add(line_);
}

}  // namespace keras_hvd

#include "tf_ops/collectives/hosts_parts.h"

#include <algorithm>
#include <utility>

#include "tf_ops/collectives/copy.h"

namespace keras_hvd {
namespace {

using Line = std::vector<Parts::Part>;

// The bytes of a stretch that are received from all other hosts at once.
constexpr int64_t kReceivedBytes = 1 << 20;
constexpr int64_t kLargestElement = 8;

// The address of a part's stretch.
const char* At(const void* tensor, int64_t offset) {
  return static_cast<const char*>(tensor) + offset;
}
char* At(void* tensor, int64_t offset) { return static_cast<char*>(tensor) + offset; }

// The parts that a host's members give to each other in a Gather.
class Relay {
 public:
  Relay(const Parts& parts, const HostsCommunicator& hosts) {
    for (int member : hosts.members_of(hosts.host())) {
      lines_.push_back(parts.of(member));
      // Each host begins with another one, so that no sender keeps all hosts waiting.
      for (int step = 1; step < hosts.hosts(); ++step) {
        AddFrom(hosts.host_after(step), member, parts, hosts);
      }
    }
  }

  const std::vector<Line>& lines() const { return lines_; }
  // The member that gives this rank a part of its line that is not its own.
  int sender(size_t number) const { return senders_[number]; }

 private:
  void AddFrom(int host, int to, const Parts& parts, const HostsCommunicator& hosts) {
    for (int from : hosts.members_of(host)) {
      if (hosts.Counterpart(from, hosts.host()) != to) continue;
      const Line& line = parts.of(from);
      lines_.back().insert(lines_.back().end(), line.begin(), line.end());
      if (to != hosts.index()) continue;
      senders_.resize(lines_.back().size(), from);
    }
  }

  std::vector<Line> lines_;
  std::vector<int> senders_;
};

// Straight to their places.
void ReceiveInPlace(const Parts& parts, const std::vector<void*>& tensors,
                    HostsCommunicator* hosts) {
  for (int step = 1; step < hosts->hosts(); ++step) {
    for (int from : hosts->members_of(hosts->host_after(step))) {
      for (const Parts::Part& part : parts.of(from)) {
        void* const tensor = tensors[part.tensor];
        hosts->Receive(from, tensor == nullptr ? nullptr : At(tensor, part.start),
                       part.bytes);
      }
    }
  }
}

// Through this rank's exchange memory, where the others of its host find them.
bool ReceiveForHost(const Parts& parts, const std::vector<const void*>& own,
                    HostsCommunicator* hosts, const std::vector<void*>& tensors) {
  const Relay relay(parts, *hosts);
  const Parts relayed(relay.lines());
  Communicator& local = hosts->local();
  const auto fill = [&](char* exchange, int64_t begin, int64_t end) {
    const auto for_each = [&](const auto& of_own, const auto& of_others) {
      relayed.ForEach(
          local.index(), begin, end,
          [&](size_t number, int64_t offset, int64_t position, int64_t bytes) {
            number < own.size() ? of_own(number, offset, exchange + position, bytes)
                                : of_others(number, offset, exchange + position, bytes);
          });
    };
    for_each(
        [&](size_t number, int64_t offset, char* place, int64_t bytes) {
          CopyOrdinary(place, At(own[number], offset), bytes);
        },
        [&](size_t number, int64_t offset, char* place, int64_t bytes) {
          const Parts::Part& part = relayed.of(local.index())[number];
          if (offset == 0) hosts->BeginReceive(relay.sender(number), part.bytes);
          hosts->Receive(relay.sender(number), place, bytes);
        });
    if (!hosts->AwaitReceived()) return false;
    for_each([](size_t, int64_t, char*, int64_t) {},
             [&](size_t number, int64_t offset, char* place, int64_t bytes) {
               const Parts::Part& part = relayed.of(local.index())[number];
               if (tensors[part.tensor] == nullptr) return;
               CopyOrdinary(At(tensors[part.tensor], part.start + offset), place,
                            bytes);
             });
    return true;
  };
  return GatherLines(relayed, &local, tensors, fill);
}

}  // namespace

bool Scatter(const Parts& parts, const std::vector<const void*>& tensors,
             HostsCommunicator* hosts, const VisitStretch& visit) {
  for (int step = 1; step < hosts->hosts(); ++step) {
    for (int member : hosts->members_of(hosts->host_after(step))) {
      for (const Parts::Part& part : parts.of(member)) {
        hosts->Send(member, At(tensors[part.tensor], part.start), part.bytes);
      }
    }
  }
  const std::vector<int>& here = hosts->members_of(hosts->host());
  const int64_t others = hosts->count() - static_cast<int64_t>(here.size());
  const int64_t most = std::max<int64_t>(kReceivedBytes / others, kLargestElement) /
                       kLargestElement * kLargestElement;
  char* const scratch = hosts->Scratch(others * most);
  std::vector<const void*> inputs(hosts->count());
  const Line& line = parts.of(hosts->index());
  const auto receive = [&](size_t number, int64_t offset, int64_t bytes) {
    char* to = scratch;
    for (int host = 0; host < hosts->hosts(); ++host) {
      if (host == hosts->host()) continue;
      for (int member : hosts->members_of(host)) {
        if (offset == 0) hosts->BeginReceive(member, line[number].bytes);
        hosts->Receive(member, to, bytes);
        inputs[member] = to;
        to += most;
      }
    }
    return hosts->AwaitReceived();
  };
  std::vector<Line> lines;
  for (int member : here) lines.push_back(parts.of(member));
  bool ok = true;
  const bool scattered = Scatter(
      Parts(std::move(lines)), tensors, &hosts->local(),
      [&](size_t number, int64_t offset, int64_t bytes, const void* const* stretches) {
        for (int64_t done = 0; ok && done < bytes; done += most) {
          const int64_t stretch = std::min(most, bytes - done);
          ok = receive(number, offset + done, stretch);
          if (!ok) return;
          for (size_t place = 0; place < here.size(); ++place) {
            inputs[here[place]] = At(stretches[place], done);
          }
          visit(number, offset + done, stretch, inputs.data());
        }
      });
  return scattered && ok && hosts->AwaitSent();
}

bool Gather(const Parts& parts, const std::vector<const void*>& own,
            HostsCommunicator* hosts, const std::vector<void*>& tensors) {
  const Line& line = parts.of(hosts->index());
  for (int step = 1; step < hosts->hosts(); ++step) {
    const int to = hosts->Counterpart(hosts->index(), hosts->host_after(step));
    for (size_t number = 0; number < line.size(); ++number) {
      hosts->Send(to, own[number], line[number].bytes);
    }
  }
  PlaceOwnParts(line, own, tensors);
  if (hosts->local().count() == 1) {
    ReceiveInPlace(parts, tensors, hosts);
  } else if (!ReceiveForHost(parts, own, hosts, tensors)) {
    return false;
  }
  return hosts->AwaitReceived() && hosts->AwaitSent();
}

}  // namespace keras_hvd

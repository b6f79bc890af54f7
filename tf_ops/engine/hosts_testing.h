// For tests of the engine: one host or several in this process. Each is a segment of
// its own, and sockets connect them.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/backend/world.h"
#include "tf_ops/transport/job_state.h"
#include "tf_ops/transport/tls_testing.h"

namespace keras_hvd {

// The host of each rank, the number of hosts below a leader, and whether their messages
// are encrypted.
struct Layout {
  std::vector<int> hosts;
  int fan_out = Topology::kFanOut;
  bool tls = false;

  int size() const { return static_cast<int>(hosts.size()); }
  Topology Of(int rank) const { return Topology(rank, hosts, fan_out); }
};

inline void PrintTo(const Layout& layout, std::ostream* to) {
  *to << "hosts";
  for (int host : layout.hosts) *to << " " << host;
  *to << ", fan-out " << layout.fan_out << (layout.tls ? ", TLS" : "");
}

// Connects the ranks of several hosts. Each rank takes its ends once.
class LinkMesh {
 public:
  explicit LinkMesh(const Layout& layout) : links_(layout.hosts.size()) {
    for (int rank = 0; rank < layout.size(); ++rank) {
      for (const Link& link : LinksNeeded(layout.Of(rank))) {
        if (link.peer < rank) continue;
        int ends[2];
        EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
        TlsEnds tls;
        if (layout.tls) tls = ShakeHands(ends[0], ends[1]);
        links_[rank].push_back(
            {link.peer, link.purpose, ends[0], tls.client.release()});
        links_[link.peer].push_back(
            {rank, link.purpose, ends[1], tls.server.release()});
      }
    }
  }
  ~LinkMesh() { Close(); }

  std::vector<Link> Take(int rank) { return std::exchange(links_[rank], {}); }
  // In a process of the rank's own, which must not keep the others' ends open.
  std::vector<Link> TakeAlone(int rank) {
    const std::vector<Link> own = Take(rank);
    Close();
    return own;
  }
  void Close() {
    for (auto& links : links_) {
      for (const Link& link : links) {
        // In silence: another process may have it, too.
        delete link.tls;
        close(link.socket);
      }
      links.clear();
    }
  }

 private:
  std::vector<std::vector<Link>> links_;
};

// The memory of each host, and the worlds of the ranks.
class Hosts {
 public:
  Hosts(const Layout& layout, int64_t exchange_bytes) : layout_(layout), mesh_(layout) {
    const Topology topology = layout.Of(0);
    segments_.resize(topology.hosts());
    for (int host = 0; host < topology.hosts(); ++host) {
      const int ranks = static_cast<int>(topology.ranks_of(host).size());
      EXPECT_TRUE(Segment::CreateLocal(ranks, exchange_bytes, &segments_[host]).ok());
      for (int index = 0; index < ranks; ++index) {
        segments_[host]->block(index).pid.store(getpid());
        strcpy(segments_[host]->block(index).host, NameOf(host).c_str());
      }
    }
    for (int rank = 0; rank < layout.size(); ++rank) {
      names_.push_back({getpid(), NameOf(topology.host_of(rank))});
    }
  }

  World WorldOf(int rank) {
    const Topology topology = layout_.Of(rank);
    if (topology.hosts() == 1) return SharedMemoryWorld(segments_.front(), rank);
    return HostsWorld(topology, segments_[topology.host()], names_, mesh_.Take(rank));
  }
  // As the ranks of its host share it.
  JobState StateOf(int rank) {
    const Topology topology = layout_.Of(rank);
    return JobState(segments_[topology.host()], topology);
  }

 private:
  static std::string NameOf(int host) { return "host" + std::to_string(host); }

  const Layout layout_;
  LinkMesh mesh_;
  std::vector<RankName> names_;
  std::vector<std::shared_ptr<Segment>> segments_;
};

}  // namespace keras_hvd

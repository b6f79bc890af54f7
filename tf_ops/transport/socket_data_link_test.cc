// Posted transfers over connections: order, pieces, back-pressure, and how links end.
#include "tf_ops/transport/socket_data_link.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/transport/tls_testing.h"

namespace keras_hvd {
namespace {

struct Ends {
  std::unique_ptr<SocketDataLink> a, b;
};

struct Way {
  bool tls;
  int connections;
};

// A link of one connection or several, in the clear or over TLS.
class SocketDataLinkTest : public testing::TestWithParam<Way> {
 protected:
  using Sockets = std::pair<int, int>;

  Ends UnixPair(int buffer_bytes = 0) const {
    return LinksOver([=] { return UnixSockets(buffer_bytes); });
  }
  Ends TcpPair() const { return LinksOver(TcpSockets); }
  static Sockets UnixSockets(int buffer_bytes);
  static Sockets TcpSockets();

 private:
  template <typename Connect>
  Ends LinksOver(const Connect& connect) const {
    Ends ends;
    for (int number = 0; number < GetParam().connections; ++number) {
      const auto [a, b] = connect();
      TlsEnds tls;
      if (GetParam().tls) tls = ShakeHands(a, b);
      Add(a, std::move(tls.client), &ends.a);
      Add(b, std::move(tls.server), &ends.b);
    }
    return ends;
  }

  static void Add(int socket, std::unique_ptr<TlsSession> tls,
                  std::unique_ptr<SocketDataLink>* link) {
    if (*link != nullptr) return (*link)->Add(socket, std::move(tls));
    *link = std::make_unique<SocketDataLink>(socket, std::move(tls));
  }
};

INSTANTIATE_TEST_SUITE_P(, SocketDataLinkTest,
                         testing::Values(Way{false, 1}, Way{false, 3}, Way{true, 1},
                                         Way{true, 3}),
                         [](const auto& info) {
                           return (info.param.tls ? "OverTlsBy" : "InTheClearBy") +
                                  std::to_string(info.param.connections);
                         });

SocketDataLinkTest::Sockets SocketDataLinkTest::UnixSockets(int buffer_bytes) {
  int sockets[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  for (int socket : sockets) {
    if (buffer_bytes == 0) continue;
    setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof(buffer_bytes));
    setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof(buffer_bytes));
  }
  return {sockets[0], sockets[1]};
}

SocketDataLinkTest::Sockets SocketDataLinkTest::TcpSockets() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  const auto any = [&] { return reinterpret_cast<sockaddr*>(&address); };
  EXPECT_EQ(bind(listener, any(), length), 0);
  EXPECT_EQ(listen(listener, 1), 0);
  EXPECT_EQ(getsockname(listener, any(), &length), 0);
  const int a = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(connect(a, any(), length), 0);
  const int b = accept(listener, nullptr, nullptr);
  close(listener);
  return {a, b};
}

bool IsIdle(const SocketDataLink& link) { return !link.sends() && !link.receives(); }

// Moves until nothing more moves.
void Settle(const Ends& ends) {
  for (int quiet = 0; quiet < 100;) {
    const bool a = ends.a->Progress();
    const bool b = ends.b->Progress();
    quiet = a || b ? 0 : quiet + 1;
  }
}

std::vector<char> Numbered(size_t bytes, int seed) {
  std::mt19937 random(seed);
  std::vector<char> data(bytes);
  for (char& byte : data) byte = static_cast<char>(random());
  return data;
}

TEST_P(SocketDataLinkTest, MovesBytesBothWays) {
  for (const Ends& ends : {UnixPair(), TcpPair()}) {
    const std::vector<char> from_a = Numbered(1000, 1), from_b = Numbered(5000000, 2);
    std::vector<char> to_b(from_a.size()), to_a(from_b.size());
    ends.a->Send(from_a.data(), from_a.size());
    ends.a->Receive(to_a.data(), to_a.size());
    ends.b->Send(from_b.data(), from_b.size());
    ends.b->Receive(to_b.data(), to_b.size());
    EXPECT_TRUE(ends.a->sends() && ends.a->receives());
    Settle(ends);
    EXPECT_TRUE(IsIdle(*ends.a) && IsIdle(*ends.b));
    EXPECT_TRUE(to_a == from_b);
    EXPECT_TRUE(to_b == from_a);
  }
}

TEST_P(SocketDataLinkTest, NeverWaits) {
  const Ends ends = TcpPair();
  EXPECT_FALSE(ends.a->Progress());
  char byte;
  ends.a->Receive(&byte, 1);
  EXPECT_FALSE(ends.a->Progress());
  EXPECT_FALSE(ends.a->closed());
  const std::vector<char> much(64 << 20);
  ends.b->Send(much.data(), much.size());
  while (ends.b->Progress()) {
  }
  EXPECT_TRUE(ends.b->sends());
}

TEST_P(SocketDataLinkTest, SendsSmallPiecesAtOnce) {
  const auto [a, b] = TcpSockets();
  const SocketDataLink one(a), other(b);
  int on = 0;
  socklen_t length = sizeof(on);
  getsockopt(a, IPPROTO_TCP, TCP_NODELAY, &on, &length);
  EXPECT_NE(on, 0);
}

// The two ends need not cut the stream alike.
TEST_P(SocketDataLinkTest, PiecesOfAnySizesArriveInOrder) {
  std::mt19937 random(3);
  for (int buffer : {0, 2048}) {
    const Ends ends = UnixPair(buffer);
    const std::vector<char> sent = Numbered(500000, 4);
    std::vector<char> received(sent.size());
    size_t posted_send = 0, posted_receive = 0;
    const auto next = [&](size_t posted) {
      const size_t most = random() % 4 == 0 ? 20000 : 100;
      return std::min(sent.size() - posted, random() % most);
    };
    while (posted_send < sent.size() || posted_receive < sent.size()) {
      if (random() % 2 == 0) {
        const size_t bytes = next(posted_send);
        ends.a->Send(sent.data() + posted_send, bytes);
        posted_send += bytes;
      } else {
        const size_t bytes = next(posted_receive);
        const int64_t end = ends.b->Receive(received.data() + posted_receive, bytes);
        posted_receive += bytes;
        EXPECT_EQ(end, static_cast<int64_t>(posted_receive));
      }
      if (random() % 8 == 0) (random() % 2 == 0 ? ends.a : ends.b)->Progress();
      const int64_t so_far = ends.b->received();
      if (random() % 64 == 0) {
        ASSERT_TRUE(std::equal(sent.begin(), sent.begin() + so_far, received.begin()));
      }
    }
    Settle(ends);
    EXPECT_TRUE(received == sent);
    EXPECT_EQ(ends.a->sent(), static_cast<int64_t>(sent.size()));
    EXPECT_EQ(ends.b->received(), static_cast<int64_t>(sent.size()));
  }
}

// More pieces than one call can take, none next to another.
TEST_P(SocketDataLinkTest, ManyScatteredPieces) {
  const Ends ends = UnixPair();
  const std::vector<char> sent = Numbered(20000, 5);
  std::vector<char> received(sent.size());
  for (size_t i = 0; i < sent.size(); i += 2) {
    ends.a->Send(&sent[i], 1);
    ends.b->Receive(&received[i], 1);
  }
  Settle(ends);
  EXPECT_TRUE(IsIdle(*ends.a) && IsIdle(*ends.b));
  for (size_t i = 0; i < sent.size(); ++i) {
    ASSERT_EQ(received[i], i % 2 == 0 ? sent[i] : 0);
  }
}

TEST_P(SocketDataLinkTest, ReadsOnlyWhatWasPosted) {
  const Ends ends = UnixPair();
  const std::string sent = "one two";
  std::string first(3, ' '), second(4, ' ');
  ends.a->Send(sent.data(), sent.size());
  ends.b->Receive(first.data(), first.size());
  Settle(ends);
  EXPECT_EQ(first, "one");
  EXPECT_EQ(ends.b->received(), 3);
  ends.b->Receive(second.data(), second.size());
  Settle(ends);
  EXPECT_EQ(second, " two");
}

TEST_P(SocketDataLinkTest, ASenderWithoutAReceiverIsHeldUp) {
  const Ends ends = UnixPair(4096);
  const std::vector<char> sent(1 << 20);
  ends.a->Send(sent.data(), sent.size());
  Settle(ends);
  EXPECT_LT(ends.a->sent(), 1 << 18);
}

TEST_P(SocketDataLinkTest, WhatComesForNoMemoryIsDropped) {
  const Ends ends = UnixPair();
  const std::vector<char> unwanted = Numbered(100000, 6);
  const std::string wanted = "wanted";
  std::string before(6, ' '), after(6, ' ');
  ends.a->Send(wanted.data(), wanted.size());
  ends.a->Send(unwanted.data(), unwanted.size());
  ends.a->Send(wanted.data(), wanted.size());
  ends.b->Receive(before.data(), before.size());
  ends.b->Receive(nullptr, unwanted.size());
  ends.b->Receive(after.data(), after.size());
  Settle(ends);
  EXPECT_EQ(before, wanted);
  EXPECT_EQ(after, wanted);
}

TEST_P(SocketDataLinkTest, NothingIsCompleteAtOnce) {
  const Ends ends = UnixPair();
  EXPECT_EQ(ends.a->Send(nullptr, 0), 0);
  EXPECT_EQ(ends.a->Receive(nullptr, 0), 0);
  EXPECT_TRUE(IsIdle(*ends.a));
  EXPECT_FALSE(ends.a->Progress());
}

TEST_P(SocketDataLinkTest, AnEndMattersToThoseWhoWaitAlone) {
  Ends ends = UnixPair();
  const std::string last = "bye";
  std::string received(3, ' ');
  ends.a->Send(last.data(), last.size());
  ends.a->Progress();
  ends.a.reset();
  ends.b->Receive(received.data(), received.size());
  ends.b->Progress();
  EXPECT_EQ(received, last);
  ends.b->Progress();
  EXPECT_FALSE(ends.b->closed());
  ends.b->Receive(received.data(), 1);
  ends.b->Progress();
  EXPECT_TRUE(ends.b->closed());
  EXPECT_EQ(ends.b->why_closed(), "it was closed");
  EXPECT_FALSE(ends.b->Progress());
}

TEST_P(SocketDataLinkTest, ASenderHearsOfTheEnd) {
  Ends ends = UnixPair();
  ends.b.reset();
  ends.a->Send("x", 1);
  ends.a->Progress();
  EXPECT_EQ(ends.a->why_closed(), "Broken pipe");
}

TEST_P(SocketDataLinkTest, AbandonedTransfersTouchNothing) {
  const Ends ends = UnixPair();
  const std::string sent = "late";
  std::string received(4, ' ');
  ends.b->Receive(received.data(), received.size());
  ends.b->Abandon();
  ends.a->Send(sent.data(), sent.size());
  Settle(ends);
  EXPECT_EQ(received, "    ");
  EXPECT_EQ(ends.b->why_closed(), "it was abandoned");
  ends.b->Receive(received.data(), received.size());
  EXPECT_FALSE(ends.b->Progress());
}

}  // namespace
}  // namespace keras_hvd

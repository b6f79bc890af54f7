// TlsSession: the bytes that it carries, and its answers to peers without the key, to
// changed bytes, and to an end that nobody announced.
#include "tf_ops/transport/tls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/transport/tls_testing.h"

namespace keras_hvd {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using Role = TlsSession::Role;

constexpr size_t kHeaderBytes = 5;
constexpr size_t kTagBytes = 17;  // with the type of the content

// Two sockets each, connected by the test in between: the client's end and the near
// end, the far end and the server's.
class TlsTest : public testing::Test {
 protected:
  TlsTest() {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, near_), 0);
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, far_), 0);
    Open(CredentialsOf(1, 2), CredentialsOf(1, 2));
  }
  ~TlsTest() override {
    for (int end : {near_[0], near_[1], far_[0], far_[1]}) close(end);
  }

  void Open(const TlsSession::Credentials& of_client,
            const TlsSession::Credentials& of_server) {
    client_ = OpenSession(near_[0], Role::kClient, of_client);
    server_ = OpenSession(far_[1], Role::kServer, of_server);
  }

  // Takes the bytes that have come at one of the ends in between.
  static std::string Take(int end) {
    static char taken[1 << 16];
    const ssize_t count = recv(end, taken, sizeof(taken), 0);
    return std::string(taken, std::max<ssize_t>(count, 0));
  }
  static void Give(int end, const std::string& bytes) {
    EXPECT_EQ(send(end, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void PassOn() {
    Give(far_[0], Take(near_[1]));
    Give(near_[1], Take(far_[0]));
  }

  void ShakeHandsThroughBoth() {
    for (int round = 0; round < 9; ++round) {
      outcomes_.first = client_->Handshake();
      PassOn();
      outcomes_.second = server_->Handshake();
      PassOn();
    }
  }

  static int64_t Write(TlsSession* session, const std::string& text) {
    const iovec piece = {const_cast<char*>(text.data()), text.size()};
    return session->Write(&piece, 1);
  }
  static int64_t Read(TlsSession* session, std::string* text) {
    const iovec piece = {text->data(), text->size()};
    return session->Read(&piece, 1);
  }

  int near_[2], far_[2];
  std::unique_ptr<TlsSession> client_, server_;
  std::pair<int64_t, int64_t> outcomes_;
};

const std::string kText = "what nobody else may read";

TEST_F(TlsTest, CarriesBytesThatNobodyElseReads) {
  ShakeHandsThroughBoth();
  ASSERT_EQ(outcomes_, (std::pair<int64_t, int64_t>(1, 1)));
  EXPECT_EQ(Write(client_.get(), kText), static_cast<int64_t>(kText.size()));
  const std::string carried = Take(near_[1]);
  EXPECT_EQ(carried.size(), kHeaderBytes + kText.size() + kTagBytes);
  EXPECT_THAT(carried, Not(HasSubstr(kText.substr(0, 4))));
  Give(far_[0], carried);
  std::string received(100, ' ');
  EXPECT_EQ(Read(server_.get(), &received), static_cast<int64_t>(kText.size()));
  EXPECT_THAT(received, StartsWith(kText));
  EXPECT_EQ(Read(server_.get(), &received), TlsSession::kWantsRead);
}

TEST_F(TlsTest, OffersNothingButOneSuiteOfTls13) {
  EXPECT_EQ(client_->Handshake(), TlsSession::kWantsRead);
  const std::string hello = Take(near_[1]);
  // The record's and the message's headers, the version, 32 random bytes, an empty or
  // full session id; then the suites.
  const size_t id_at = 5 + 4 + 2 + 32;
  ASSERT_GT(hello.size(), id_at);
  const size_t suites_at = id_at + 1 + static_cast<unsigned char>(hello[id_at]);
  // One, and perhaps the signal that it does not renegotiate (0x00ff).
  const std::string suites = hello.substr(suites_at + 2, hello[suites_at + 1]);
  EXPECT_THAT(suites, StartsWith("\x13\x01"));
  EXPECT_TRUE(suites.size() == 2 || suites.substr(2) == std::string("\0\xff", 2));
  // supported_versions: 1.3 alone. psk_key_exchange_modes: with (EC)DHE alone.
  EXPECT_THAT(hello, HasSubstr(std::string("\0\x2b\0\x03\x02\x03\x04", 7)));
  EXPECT_THAT(hello, HasSubstr(std::string("\0\x2d\0\x02\x01\x01", 6)));
}

TEST_F(TlsTest, SendsNoTickets) {
  EXPECT_EQ(client_->Handshake(), TlsSession::kWantsRead);
  PassOn();
  EXPECT_EQ(server_->Handshake(), TlsSession::kWantsRead);
  PassOn();
  EXPECT_EQ(client_->Handshake(), 1);
  PassOn();
  EXPECT_EQ(server_->Handshake(), 1);
  EXPECT_EQ(Take(far_[0]), "");
}

// As ranks that are ahead of each other do, with sockets that take little.
TEST_F(TlsTest, PiecesOfAnySizesArriveInOrder) {
  std::mt19937 random(5);
  for (const int buffer : {2048, 1 << 20}) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    for (int end : ends) {
      setsockopt(end, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof(buffer));
    }
    const TlsEnds tls = ShakeHands(ends[0], ends[1]);
    std::string sent(4 << 20, ' ');
    for (char& byte : sent) byte = static_cast<char>(random());
    std::string received(sent.size(), ' ');
    // Some pieces from here on, of sizes around those of records and buffers.
    const auto cut = [&](std::string* bytes, size_t at, iovec* pieces) {
      int count = 0;
      for (; count < 8 && at < bytes->size(); ++count) {
        const size_t most = random() % 3 == 0 ? 100 : 300000;
        const size_t size = std::min(bytes->size() - at, random() % most + 1);
        pieces[count] = {bytes->data() + at, size};
        at += size;
      }
      return count;
    };
    size_t written = 0, read = 0;
    while (read < sent.size()) {
      iovec pieces[8];
      int64_t moved = 0;
      if (written < sent.size() && random() % 2 == 0) {
        const int count = cut(&sent, written, pieces);
        moved = tls.client->Write(pieces, count);
        if (moved > 0) written += moved;
      } else {
        const int count = cut(&received, read, pieces);
        moved = tls.server->Read(pieces, count);
        if (moved > 0) read += moved;
      }
      ASSERT_TRUE(moved > 0 || IsUnderWay(moved)) << tls.server->why_failed();
    }
    EXPECT_TRUE(received == sent);
    for (int end : ends) close(end);
  }
}

// The system says of a socket whose bytes were taken in that there is nothing to read.
TEST_F(TlsTest, WhatWasTakenInIsReadWithoutTheSocket) {
  ShakeHandsThroughBoth();
  for (int i = 0; i < 3; ++i) Write(client_.get(), kText);
  PassOn();
  std::string byte(1, ' '), received;
  for (size_t i = 0; i < 3 * kText.size(); ++i) {
    ASSERT_EQ(Read(server_.get(), &byte), 1);
    received += byte;
    pollfd socket = {far_[1], POLLIN, 0};
    ASSERT_EQ(poll(&socket, 1, 0), 0);
  }
  EXPECT_EQ(received, kText + kText + kText);
}

// A reader that got fewer bytes than it asked for sleeps until the socket has more.
TEST_F(TlsTest, ReadsAllThatHasCome) {
  ShakeHandsThroughBoth();
  for (int i = 0; i < 3; ++i) Write(client_.get(), kText);
  PassOn();
  std::string received(1000, ' ');
  const std::string expected = kText + kText + kText;
  EXPECT_EQ(Read(server_.get(), &received), static_cast<int64_t>(expected.size()));
  EXPECT_THAT(received, StartsWith(expected));
}

TEST_F(TlsTest, SmallPiecesShareARecord) {
  ShakeHandsThroughBoth();
  std::string sent(9, 'x');
  std::vector<iovec> pieces;
  for (char& byte : sent) pieces.push_back({&byte, 1});
  EXPECT_EQ(client_->Write(pieces.data(), static_cast<int>(pieces.size())), 9);
  EXPECT_EQ(Take(near_[1]).size(), kHeaderBytes + 9 + kTagBytes);
}

// A key serves for a number of records only.
TEST_F(TlsTest, ChangesItsKeyInTime) {
  ShakeHandsThroughBoth();
  std::string byte = "x", received(1 << 16, ' ');
  int64_t sent = 0, read = 0, changes = 0;
  for (; sent < (1 << 16) + 1000; ++sent) {
    ASSERT_EQ(Write(client_.get(), byte), 1);
    const std::string carried = Take(near_[1]);
    // A message of five bytes is in front.
    const size_t record = kHeaderBytes + 1 + kTagBytes;
    if (carried.size() > record) changes += carried.size() == 2 * record + 4;
    Give(far_[0], carried);
    if (sent % 64 == 0) read += std::max<int64_t>(Read(server_.get(), &received), 0);
  }
  while (read < sent) {
    const int64_t count = Read(server_.get(), &received);
    ASSERT_GT(count, 0) << server_->why_failed();
    read += count;
  }
  EXPECT_EQ(changes, 1);
}

// ---- Ends

TEST_F(TlsTest, AnAnnouncedEndIsOneAndTheOtherDirectionGoesOn) {
  ShakeHandsThroughBoth();
  Write(client_.get(), kText);
  client_->EndWriting();
  PassOn();
  std::string received(kText.size(), ' ');
  EXPECT_EQ(Read(server_.get(), &received), static_cast<int64_t>(kText.size()));
  EXPECT_EQ(Read(server_.get(), &received), TlsSession::kEnded);
  EXPECT_EQ(Read(server_.get(), &received), TlsSession::kEnded);
  Write(server_.get(), kText);
  PassOn();
  EXPECT_EQ(Read(client_.get(), &received), static_cast<int64_t>(kText.size()));
  EXPECT_EQ(received, kText);
}

TEST_F(TlsTest, AnEndThatNobodyAnnouncedIsAFailure) {
  ShakeHandsThroughBoth();
  Write(client_.get(), kText);
  PassOn();
  shutdown(far_[0], SHUT_WR);
  std::string received(kText.size(), ' ');
  EXPECT_EQ(Read(server_.get(), &received), static_cast<int64_t>(kText.size()));
  EXPECT_EQ(Read(server_.get(), &received), TlsSession::kLost);
  EXPECT_EQ(server_->why_failed(), "it was cut off");
  EXPECT_EQ(Read(server_.get(), &received), TlsSession::kLost);
}

TEST_F(TlsTest, WritingToWhoHasGoneIsAnError) {
  ShakeHandsThroughBoth();
  shutdown(near_[1], SHUT_RDWR);
  EXPECT_EQ(Write(client_.get(), kText), TlsSession::kLost);
  EXPECT_EQ(client_->why_failed(), "Broken pipe");
}

// ---- Others

TEST_F(TlsTest, AnotherKeyIsRefusedByBoth) {
  for (const auto& other : {CredentialsOf(1, 3), CredentialsOf(3, 2)}) {
    Open(CredentialsOf(1, 2), other);
    ShakeHandsThroughBoth();
    EXPECT_EQ(outcomes_.second, TlsSession::kRefused);
    EXPECT_EQ(client_->Handshake(), TlsSession::kRefused);
    for (const auto* session : {client_.get(), server_.get()}) {
      EXPECT_THAT(session->why_failed(), StartsWith("TLS: "));
    }
  }
}

TEST_F(TlsTest, WhoSpeaksInTheClearIsRefused) {
  EXPECT_EQ(client_->Handshake(), TlsSession::kWantsRead);
  for (int end : {near_[1], far_[0]}) Give(end, std::string(8, '\0') + kText);
  for (TlsSession* session : {client_.get(), server_.get()}) {
    EXPECT_EQ(session->Handshake(), TlsSession::kRefused);
    EXPECT_THAT(session->why_failed(), StartsWith("TLS: "));
  }
}

TEST_F(TlsTest, OneChangedBitIsAnErrorAndNoData) {
  for (const size_t place : {size_t{0}, size_t{4}, kHeaderBytes, kHeaderBytes + 9,
                             kHeaderBytes + kText.size() + kTagBytes - 1}) {
    Open(CredentialsOf(1, 2), CredentialsOf(1, 2));
    ShakeHandsThroughBoth();
    Write(client_.get(), kText);
    Write(client_.get(), kText);
    std::string carried = Take(near_[1]);
    carried[place] ^= 1;
    Give(far_[0], carried);
    std::string received(kText.size(), ' ');
    EXPECT_EQ(Read(server_.get(), &received), TlsSession::kRefused) << place;
    EXPECT_THAT(server_->why_failed(), StartsWith("TLS: "));
    EXPECT_EQ(received, std::string(kText.size(), ' '));
    PassOn();
    // The other end is told.
    EXPECT_EQ(Read(client_.get(), &received), TlsSession::kRefused);
    EXPECT_THAT(client_->why_failed(), HasSubstr("alert"));
  }
}

TEST_F(TlsTest, ARecordThatComesTwiceIsAnError) {
  ShakeHandsThroughBoth();
  Write(client_.get(), kText);
  const std::string carried = Take(near_[1]);
  Give(far_[0], carried + carried);
  std::string received(kText.size(), ' ');
  EXPECT_EQ(Read(server_.get(), &received), static_cast<int64_t>(kText.size()));
  EXPECT_EQ(Read(server_.get(), &received), TlsSession::kRefused);
}

}  // namespace
}  // namespace keras_hvd

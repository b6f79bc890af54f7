// For tests: TLS between two ends of one process.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>

#include <memory>

#include "tf_ops/transport/tls.h"

namespace keras_hvd {

struct TlsEnds {
  std::unique_ptr<TlsSession> client, server;
};

inline TlsSession::Credentials CredentialsOf(unsigned char identity,
                                             unsigned char key) {
  TlsSession::Credentials credentials;
  credentials.identity.fill(identity);
  credentials.key.fill(key);
  return credentials;
}

inline std::unique_ptr<TlsSession> OpenSession(
    int socket, TlsSession::Role role,
    const TlsSession::Credentials& credentials = CredentialsOf(1, 2)) {
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
  std::unique_ptr<TlsSession> session;
  const Status status = TlsSession::Open("", socket, role, credentials, &session);
  EXPECT_EQ(status.message, "");
  return session;
}

// Returns whether a handshake is still under way.
inline bool IsUnderWay(int64_t outcome) {
  return outcome == TlsSession::kWantsRead || outcome == TlsSession::kWantsWrite;
}

// Sessions over two connected sockets.
inline TlsEnds ShakeHands(int client, int server) {
  TlsEnds ends = {OpenSession(client, TlsSession::Role::kClient),
                  OpenSession(server, TlsSession::Role::kServer)};
  int64_t of_client = TlsSession::kWantsRead, of_server = TlsSession::kWantsRead;
  while (IsUnderWay(of_client) || IsUnderWay(of_server)) {
    of_client = ends.client->Handshake();
    of_server = ends.server->Handshake();
  }
  EXPECT_EQ(of_client, 1) << ends.client->why_failed();
  EXPECT_EQ(of_server, 1) << ends.server->why_failed();
  return ends;
}

}  // namespace keras_hvd

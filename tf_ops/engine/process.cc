#include "tf_ops/engine/process.h"

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

#include "tf_ops/transport/liveness.h"

namespace keras_hvd {
namespace {

constexpr int kFatalSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

// The handlers' data, on any thread.
std::atomic<RankBlock*> g_block{nullptr};
std::atomic<bool> g_forked{false};
struct sigaction g_previous[NSIG];

constexpr size_t kMostConnections = 8192;
std::atomic<int> g_connections[kMostConnections];
// Held to change these; the handlers only read them.
std::mutex g_changing;

// Marks the rank dead before a core dump, which may take minutes. Then acts as if there
// were no handler.
void OnFatalSignal(int signal, siginfo_t* info, void* context) {
  RankBlock* block = g_block.exchange(nullptr);
  if (block != nullptr && !g_forked.load()) {
    Liveness::MarkCrashed(block, signal);
    for (std::atomic<int>& connection : g_connections) {
      const int descriptor = connection.load();
      if (descriptor > 0) shutdown(descriptor, SHUT_RDWR);
    }
  }
  const struct sigaction& previous = g_previous[signal];
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    return previous.sa_sigaction(signal, info, context);
  }
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    return previous.sa_handler(signal);
  }
  // With the default action in place, the signal comes again: by itself if an
  // instruction caused it, by this call if it was sent.
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);
  raise(signal);
}

// A forked child has neither the engine's threads nor its memory. It must not keep the
// parent's connections open: their end tells the peers of the parent's death.
void AfterForkInChild() {
  if (g_block.load() == nullptr) return;
  g_forked.store(true);
  for (std::atomic<int>& connection : g_connections) {
    const int descriptor = connection.exchange(-1);
    if (descriptor > 0) close(descriptor);
  }
}

void InstallHandlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, AfterForkInChild);
    for (int signal : kFatalSignals) {
      struct sigaction action = {};
      action.sa_sigaction = OnFatalSignal;
      action.sa_flags = SA_SIGINFO | SA_ONSTACK;
      sigemptyset(&action.sa_mask);
      sigaction(signal, &action, &g_previous[signal]);
    }
  });
}

}  // namespace

bool IsForked() { return g_forked.load(); }

void EnterWorld(RankBlock* block, const std::vector<int>& connections) {
  InstallHandlers();
  std::lock_guard<std::mutex> lock(g_changing);
  for (size_t i = 0; i < kMostConnections; ++i) {
    g_connections[i].store(i < connections.size() ? connections[i] : -1);
  }
  g_block.store(block);
}

void LeaveWorld(RankBlock* block) {
  std::lock_guard<std::mutex> lock(g_changing);
  if (!g_block.compare_exchange_strong(block, nullptr)) return;
  for (std::atomic<int>& connection : g_connections) connection.store(-1);
}

}  // namespace keras_hvd

// For tests of several processes: children forked from the test.
//
// Fork them before the test starts a thread: a thread sanitizer ends a child that is
// forked from several threads and starts one itself.
#pragma once

#include <errno.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

namespace keras_hvd {

// A child process that runs `body`, reports to its parent, and takes orders.
class Child {
 public:
  // A child's end of the link: one line out at a time, one word in at a time.
  class Link {
   public:
    Link(int in, int out) : in_(in), out_(out) {}
    void Tell(const std::string& line) const {
      const std::string text = line + "\n";
      if (write(out_, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
        _exit(90);
      }
    }
    // Waits for the parent's word.
    void Await() const {
      char word;
      if (read(in_, &word, 1) != 1) _exit(91);
    }

   private:
    int in_, out_;
  };

  // The child ends with the value of `body` as its code.
  explicit Child(const std::function<int(const Link&)>& body) {
    int in[2], out[2];
    EXPECT_EQ(pipe(in) + pipe(out), 0);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(in[1]);
      close(out[0]);
      _exit(body(Link(in[0], out[1])));
    }
    EXPECT_GT(pid_, 0);
    close(in[0]);
    close(out[1]);
    to_ = in[1];
    from_ = out[0];
  }
  ~Child() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      Reap();
    }
    close(to_);
    close(from_);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  int pid() const { return pid_; }
  void Go() const { EXPECT_EQ(write(to_, "g", 1), 1); }
  void Kill(int signal) const { EXPECT_EQ(kill(pid_, signal), 0); }

  // The child's next line; "" if it ended, or said nothing for a minute.
  std::string Line() const {
    std::string line;
    char byte;
    pollfd waiting = {from_, POLLIN, 0};
    while (poll(&waiting, 1, 60000) == 1 && read(from_, &byte, 1) == 1) {
      if (byte == '\n') return line;
      line += byte;
    }
    return line;
  }

  // Waits for its end, and gives the status of waitpid.
  int Reap() {
    int status = -1;
    while (waitpid(pid_, &status, 0) == -1 && errno == EINTR) {
    }
    pid_ = -1;
    return status;
  }

 private:
  int pid_ = -1;
  int to_ = -1;
  int from_ = -1;
};

}  // namespace keras_hvd

// HalvingSteps: carried out by all hosts, on sums that are written down.
#include "tf_ops/collectives/halving_doubling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <utility>

namespace keras_hvd {
namespace {

// The sum that staged_reduction.h promises, as "((0+1)+2)".
std::string SumOf(int begin, int end) {
  if (end - begin == 1) return std::to_string(begin);
  int first = 1;
  while (2 * first < end - begin) first *= 2;
  return "(" + SumOf(begin, begin + first) + "+" + SumOf(begin + first, end) + ")";
}

struct Host {
  explicit Host(int number, int hosts)
      : number(number),
        steps(HalvingSteps(number, hosts)),
        sums(HalvingParts(hosts), std::to_string(number)),
        results(HalvingParts(hosts)) {}

  const int number;
  std::vector<ExchangeStep> steps;
  size_t next = 0;
  bool has_sent = false;  // the next step's parts
  std::vector<std::string> sums, results;
  int sent = 0, received = 0;  // parts
};

// All hosts, each as far as it can go.
class Hosts {
 public:
  explicit Hosts(int count) {
    for (int number = 0; number < count; ++number) hosts_.emplace_back(number, count);
  }

  void Run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (Host& host : hosts_) {
        while (Advance(&host)) moved = true;
      }
    }
  }

  const std::deque<Host>& hosts() const { return hosts_; }
  bool nothing_is_left() const {
    return std::all_of(links_.begin(), links_.end(),
                       [](const auto& link) { return link.second.empty(); });
  }

 private:
  bool Advance(Host* host) {
    if (host->next == host->steps.size()) return false;
    const ExchangeStep& step = host->steps[host->next];
    if (!host->has_sent) Send(step, host);
    std::deque<std::string>& link = links_[{step.host, host->number}];
    const size_t awaited = step.receives.end - step.receives.begin;
    if (link.size() < awaited) return false;
    for (int part = step.receives.begin; part < step.receives.end; ++part) {
      Receive(step, part, link.front(), host);
      link.pop_front();
    }
    ++host->next;
    host->has_sent = false;
    return true;
  }

  // The last sum of a part is the result, on the host that makes it.
  void Send(const ExchangeStep& step, Host* host) {
    host->has_sent = true;
    for (int part = step.sends.begin; part < step.sends.end; ++part) {
      std::string& result = host->results[part];
      if (step.results && result.empty()) result = host->sums[part];
      links_[{host->number, step.host}].push_back(step.results ? result
                                                               : host->sums[part]);
      ++host->sent;
    }
  }

  void Receive(const ExchangeStep& step, int part, const std::string& come,
               Host* host) {
    ++host->received;
    if (step.results) {
      EXPECT_EQ(host->results[part], "");
      host->results[part] = come;
      return;
    }
    std::string& sum = host->sums[part];
    const bool is_first = host->number < step.host;
    sum = "(" + (is_first ? sum : come) + "+" + (is_first ? come : sum) + ")";
  }

  std::deque<Host> hosts_;
  std::map<std::pair<int, int>, std::deque<std::string>> links_;
};

TEST(HalvingDoublingTest, AllHaveAllResultsInTheOrderOfPairs) {
  for (int count = 2; count <= 70; ++count) {
    Hosts hosts(count);
    hosts.Run();
    for (const Host& host : hosts.hosts()) {
      EXPECT_EQ(host.next, host.steps.size()) << host.number << " of " << count;
      EXPECT_EQ(host.results,
                std::vector<std::string>(HalvingParts(count), SumOf(0, count)))
          << host.number << " of " << count;
    }
    EXPECT_TRUE(hosts.nothing_is_left()) << count;
  }
}

// Twice the vector, as little as it can be for many hosts.
TEST(HalvingDoublingTest, NoHostSendsOrReceivesMoreThanTheVectorTwice) {
  for (int count = 2; count <= 70; ++count) {
    Hosts hosts(count);
    hosts.Run();
    for (const Host& host : hosts.hosts()) {
      EXPECT_LE(host.sent, 2 * HalvingParts(count)) << host.number << " of " << count;
      EXPECT_LE(host.received, 2 * HalvingParts(count))
          << host.number << " of " << count;
    }
  }
}

TEST(HalvingDoublingTest, APowerOfTwoTakesTwiceItsLogarithm) {
  for (int bits = 1; bits <= 10; ++bits) {
    EXPECT_EQ(HalvingSteps(1, 1 << bits).size(), 2 * static_cast<size_t>(bits));
  }
}

}  // namespace
}  // namespace keras_hvd

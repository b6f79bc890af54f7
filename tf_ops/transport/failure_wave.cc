#include "tf_ops/transport/failure_wave.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tf_ops/transport/faults.h"

namespace keras_hvd {
namespace {

// How long a host waits for those below it; the topmost one waits longest.
constexpr std::chrono::milliseconds kPatienceBelow(700);
constexpr std::chrono::milliseconds kPatienceOfTopmost(1000);
// After this long, a host passes over a silent one above, such as a stopped one. If it
// is then the topmost one, it waits this long for hosts that do so later.
constexpr std::chrono::milliseconds kPatienceAbove(1400);
constexpr std::chrono::milliseconds kPatienceInItsPlace(1800);
// A host that has said nothing for this long is told by way of its other ranks.
constexpr std::chrono::milliseconds kSilence(250);

// A rank's last operation, as it travels: with its age, since hosts' clocks differ.
struct Account {
  static constexpr uint64_t kRecords = 3;
  struct Record {
    uint64_t age_ns;
    uint32_t phase, kind;
    uint64_t name[OperationRecord::kNameWords];
  };
  int32_t rank;
  uint32_t zeros;
  uint64_t written;
  Record records[kRecords];
};

Account AccountOf(int rank, const OperationHistory& history) {
  Account account = {};
  account.rank = rank;
  account.written = history.written.load(std::memory_order_acquire);
  const uint64_t now = NowNanoseconds();
  for (uint64_t back = 1; back <= std::min(Account::kRecords, account.written);
       ++back) {
    const uint64_t place = (account.written - back) % OperationHistory::kRecords;
    const OperationRecord& record = history.records[place];
    Account::Record& copy = account.records[back - 1];
    copy.age_ns = now - record.time_ns.load(std::memory_order_relaxed);
    copy.phase = record.phase.load(std::memory_order_relaxed);
    copy.kind = record.kind.load(std::memory_order_relaxed);
    for (int i = 0; i < OperationRecord::kNameWords; ++i) {
      copy.name[i] = record.name[i].load(std::memory_order_relaxed);
    }
  }
  return account;
}

void Restore(const Account& account, OperationHistory* history) {
  history->written.store(account.written);
  const uint64_t now = NowNanoseconds();
  for (uint64_t back = 1; back <= std::min(Account::kRecords, account.written);
       ++back) {
    const uint64_t place = (account.written - back) % OperationHistory::kRecords;
    OperationRecord& record = history->records[place];
    const Account::Record& copy = account.records[back - 1];
    record.time_ns.store(now - copy.age_ns);
    record.phase.store(copy.phase);
    record.kind.store(copy.kind);
    for (int i = 0; i < OperationRecord::kNameWords; ++i) {
      record.name[i].store(copy.name[i]);
    }
  }
}

}  // namespace

std::string FailureFrame(const Status& failure) {
  const int32_t code = static_cast<int32_t>(failure.code);
  return std::string(reinterpret_cast<const char*>(&code), sizeof(code)) +
         failure.message;
}

FailureWave::FailureWave(const Topology& topology, JobState* job,
                         const std::vector<ControlLink*>& control,
                         std::vector<std::unique_ptr<ControlLink>> links)
    : topology_(topology), job_(*job), own_links_(std::move(links)) {
  std::vector<ControlLink*> all = control;
  for (const auto& link : own_links_) all.push_back(link.get());
  for (ControlLink* link : all) {
    const int host = topology_.host_of(link->peer());
    Contact& contact = contacts_[host];
    contact.links.push_back(link);
    // Others speak when their leader has gone.
    if (link->peer() == topology_.leader_of(host)) contact.voice = link;
  }
}

// ---- Hosts and links

FailureWave::Contact* FailureWave::Find(int host) {
  const auto found = contacts_.find(host);
  return found == contacts_.end() ? nullptr : &found->second;
}

FailureWave::Contact* FailureWave::ContactOf(const ControlLink* link) {
  return Find(topology_.host_of(link->peer()));
}

void FailureWave::NoteUnreachable(int host) { Find(host)->is_lost = true; }

bool FailureWave::HasOthers(int host) const {
  const std::vector<ControlLink*>& links = contacts_.at(host).links;
  return std::any_of(links.begin(), links.end(), [](const ControlLink* link) {
    return link->why_closed().empty();
  });
}

// Another rank has not heard the news that the one before was told.
void FailureWave::SetVoice(Contact* contact, ControlLink* voice) {
  contact->voice = voice;
  contact->was_told = false;
  contact->has_accounts = false;
}

void FailureWave::CheckContact(int host, Clock::time_point now) {
  Contact* const contact = Find(host);
  if (contact->voice != nullptr && !contact->voice->why_closed().empty()) {
    SetVoice(contact, nullptr);
    contact->silent_since = now;
  }
  if (contact->voice != nullptr || contact->is_lost) return;
  const Clock::time_point since = std::max(contact->silent_since, known_since_);
  contact->is_lost = !HasOthers(host) || now >= since + kSuccession;
}

// The host above, or the one to turn to instead; -1: none is left.
int FailureWave::Above() {
  const int host = topology_.host();
  for (const int above :
       {topology_.parent_of(host), topology_.substitute_parent_of(host)}) {
    const Contact* const contact = Find(above);
    if (contact != nullptr && !IsPassedOver(*contact)) return above;
  }
  return -1;
}

bool FailureWave::IsPassedOver(const Contact& contact) const {
  return contact.is_lost ||
         (!contact.has_spoken && now_ >= known_since_ + kPatienceAbove);
}

bool FailureWave::IsAbove(const ControlLink* link) const {
  const int there = topology_.host_of(link->peer()), here = topology_.host();
  return there == topology_.parent_of(here) ||
         there == topology_.substitute_parent_of(here);
}

std::vector<int> FailureWave::Below() {
  std::vector<int> below = topology_.children();
  // In the place of a lost host come those that turn to this one instead.
  for (const int child : topology_.children()) {
    if (!Find(child)->is_lost) continue;
    const std::vector<int> orphans = topology_.children_of(child);
    below.insert(below.end(), orphans.begin(), orphans.end());
  }
  if (topology_.host() == 1 && IsPassedOver(*Find(0))) {
    const std::vector<int> orphans = topology_.children_of(0);
    below.insert(below.end(), orphans.begin(), orphans.end());
  }
  below.erase(std::remove_if(below.begin(), below.end(),
                             [this](int host) {
                               const Contact* const contact = Find(host);
                               return contact == nullptr || contact->is_lost;
                             }),
              below.end());
  return below;
}

void FailureWave::Send(Contact* contact, FrameType type, std::string_view bytes) {
  if (contact->voice == nullptr) return;
  contact->voice->Queue(type, bytes);
  contact->voice->Flush();
}

// ---- Receiving

bool FailureWave::Receive() {
  bool progressed = false;
  for (const auto& link : own_links_) {
    link->Flush();
    progressed |= link->Receive();
    FrameType type;
    std::string_view bytes;
    while (link->Next(&type, &bytes)) Take(link.get(), type, bytes);
  }
  return progressed;
}

void FailureWave::Take(ControlLink* from, FrameType type, std::string_view bytes) {
  Contact& contact = *ContactOf(from);
  if (contact.voice != from) SetVoice(&contact, from);
  contact.has_spoken = true;
  contact.is_lost = false;
  if (type == FrameType::kFailure) {
    int32_t code;
    if (bytes.size() < sizeof(code)) return;
    memcpy(&code, bytes.data(), sizeof(code));
    if (code < 1 || code > static_cast<int32_t>(Code::kMismatch)) return;
    job_.Fail(static_cast<Code>(code), std::string(bytes.substr(sizeof(code))));
  } else if (type == FrameType::kKnown) {
    TakeAccounts(bytes);
    contact.knows = true;
  } else if (type == FrameType::kAllKnow && (IsAbove(from) || topology_.host() == 0)) {
    // Host 1 says so in the place of host 0, which was passed over.
    NoteAllKnow();
  }
}

// ---- Speaking

// Whether this rank speaks for its host.
bool FailureWave::TakeVoice(Clock::time_point now) {
  const uint32_t self = topology_.rank() + 1;
  uint32_t speaker = job_.header().speaker.load();
  if (speaker == self) return true;
  const bool vacant = speaker == 0;
  const int expected = vacant ? topology_.leader() : static_cast<int>(speaker) - 1;
  const bool is_late = vacant && now >= known_since_ + kSuccession;
  if (expected != topology_.rank() && !is_late && !job_.HasGone(expected)) return false;
  FaultPoint();
  return job_.header().speaker.compare_exchange_strong(speaker, self);
}

// The leader of a host may be stopped, and then its other ranks know nothing.
void FailureWave::TellOfFailure(Clock::time_point now) {
  const std::string bytes = FailureFrame(job_.Failure());
  for (auto& [host, contact] : contacts_) {
    if (contact.was_told || contact.voice == nullptr) continue;
    contact.was_told = true;
    Send(&contact, FrameType::kFailure, bytes);
  }
  if (told_others_ || now < known_since_ + kSilence) return;
  told_others_ = true;
  for (auto& [host, contact] : contacts_) {
    if (contact.has_spoken) continue;
    for (ControlLink* const link : contact.links) {
      if (link == contact.voice) continue;
      link->Queue(FrameType::kFailure, bytes);
      link->Flush();
    }
  }
}

// Whether those that this host waits for have answered, or waited long enough.
bool FailureWave::HaveAnswered(int above, Clock::time_point now) {
  auto patience = above < 0 ? kPatienceOfTopmost : kPatienceBelow;
  const Contact* const parent = Find(topology_.parent_of(topology_.host()));
  if (above < 0 && parent != nullptr && !parent->is_lost)
    patience = kPatienceInItsPlace;
  if (now >= known_since_ + patience) return true;
  for (const auto& [host, contact] : contacts_) {
    if (contact.voice == nullptr && !contact.is_lost) return false;
  }
  const std::vector<int> below = Below();
  return std::all_of(below.begin(), below.end(),
                     [this](int host) { return Find(host)->knows; });
}

void FailureWave::Continue(Clock::time_point now) {
  now_ = now;
  known_since_ = std::min(known_since_, now);
  const bool all_know = job_.header().all_know.load() != 0;
  if (all_know && !speaks_ && job_.header().speaker.load() != 0) return;
  speaks_ = TakeVoice(now);
  if (!speaks_) return;
  for (auto& [host, contact] : contacts_) CheckContact(host, now);
  // Even if all are said to know: the messages of one host to another may take
  // different ways.
  TellOfFailure(now);
  const int above = Above();
  if (all_know || !HaveAnswered(above, now)) return;
  // A rank that is crashing has shut its links down itself.
  if (job_.has_departed()) return;
  if (above < 0) {
    is_topmost_ = true;
    NoteAllKnow();
    return;
  }
  Contact* const contact = Find(above);
  if (contact->voice == nullptr || std::exchange(contact->has_accounts, true)) return;
  Send(contact, FrameType::kKnown, Accounts());
}

void FailureWave::NoteAllKnow() {
  FaultPoint();
  if (job_.header().all_know.exchange(1) != 0) return;
  for (auto& [host, contact] : contacts_) Send(&contact, FrameType::kAllKnow, "");
  job_.WakeAll();
}

bool FailureWave::AllKnow(Clock::time_point now) const {
  if (job_.header().all_know.load() != 0) return true;
  return known_since_ != Clock::time_point::max() && now >= known_since_ + kPatience;
}

// ---- The ranks' last operations

std::string FailureWave::Accounts() {
  std::string bytes;
  const auto add = [&bytes](int rank, const OperationHistory& history) {
    const Account account = AccountOf(rank, history);
    bytes.append(reinterpret_cast<const char*>(&account), sizeof(account));
  };
  for (const int rank : topology_.local_ranks()) add(rank, job_.History(rank));
  for (const auto& [rank, history] : histories_) add(rank, *history);
  return bytes;
}

void FailureWave::TakeAccounts(std::string_view bytes) {
  for (; bytes.size() >= sizeof(Account); bytes.remove_prefix(sizeof(Account))) {
    Account account;
    memcpy(&account, bytes.data(), sizeof(account));
    if (account.rank < 0 || account.rank >= topology_.size()) continue;
    std::unique_ptr<OperationHistory>& history = histories_[account.rank];
    if (history == nullptr) history = std::make_unique<OperationHistory>();
    Restore(account, history.get());
  }
}

OperationHistory* FailureWave::FindHistory(int rank) const {
  const auto found = histories_.find(rank);
  return found == histories_.end() ? nullptr : found->second.get();
}

}  // namespace keras_hvd

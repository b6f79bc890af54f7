// Collectives across hosts: every kind, over all sorts of hosts and process sets.
#include "tf_ops/backend/hosts_backend.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <string>

#include "tf_ops/backend/hosts_testing.h"
#include "tf_ops/collectives/adasum.h"
#include "tf_ops/collectives/parts.h"

namespace keras_hvd {
namespace {

using Buffer = std::vector<char>;
using Tensors = std::vector<Buffer>;

struct Shape {
  DataType dtype;
  int64_t rows;
  int64_t row_elements = 1;

  int64_t row_bytes() const { return row_elements * Bytes(dtype); }
  int64_t bytes() const { return rows * row_bytes(); }
};
using Group = std::vector<Shape>;

// ---- Requests and results

struct Request {
  Description description;
  // By member, and within it by tensor.
  std::vector<Tensors> inputs;
  std::vector<std::vector<int64_t>> rows, splits;
  bool in_place = false;
  int64_t window_bytes = kAllreduceWindowBytes;
  int64_t small_bytes = kAllreduceSmallBytes;
  std::vector<int> without_memory;  // members that cannot allocate results
};

// No NaN and no infinity, whose bits may differ from one order of sums to another.
void ClearHighestExponentBits(DataType dtype, Buffer* bytes) {
  const size_t step = Bytes(dtype);
  for (size_t i = step - 1; i < bytes->size(); i += step) (*bytes)[i] &= ~0x40;
}

Buffer RandomElements(DataType dtype, int64_t bytes, uint64_t seed) {
  Buffer elements = RandomBytes(bytes, seed);
  if (dtype == DataType::kBool) {
    for (char& byte : elements) byte &= 1;
  }
  if (IsFloating(dtype)) ClearHighestExponentBits(dtype, &elements);
  return elements;
}

Request GroupRequest(Kind kind, const Group& group, int members, uint64_t seed) {
  Request request;
  request.description.kind = kind;
  for (const Shape& shape : group) {
    request.description.tensors.push_back(
        {shape.dtype, {shape.rows, shape.row_elements}});
  }
  for (int member = 0; member < members; ++member) {
    Tensors& tensors = request.inputs.emplace_back();
    for (const Shape& shape : group) {
      tensors.push_back(RandomElements(shape.dtype, shape.bytes(), ++seed));
    }
  }
  return request;
}

int64_t OutputBytes(const Request& request, size_t tensor, int member) {
  const TensorDescription& description = request.description.tensors[tensor];
  if (request.description.kind != Kind::kReducescatter) {
    return Elements(description) * Bytes(description.dtype);
  }
  const int members = static_cast<int>(request.inputs.size());
  return PartSize(description.shape.front(), member, members) * RowBytes(description);
}

// From how many hosts on a test's allreduces exchange by halving.
int64_t halving_hosts = kHalvingHosts;

// Carries out a member's request. Returns its results.
Tensors Carry(const Request& request, int member, CollectiveBackend* backend,
              bool succeeds = true) {
  auto operation = std::make_unique<Operation>();
  auto description = std::make_shared<Description>(request.description);
  Tensors outputs(request.inputs[member].size());
  if (!request.rows.empty()) operation->rows = request.rows[member];
  if (!request.splits.empty()) operation->splits = request.splits[member];
  const bool fails =
      std::count(request.without_memory.begin(), request.without_memory.end(), member);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Buffer& input = request.inputs[member][i];
    if (HasOwnRows(description->kind)) {
      operation->buffers.push_back({input.data(), nullptr});
      continue;
    }
    if (request.in_place) {
      outputs[i] = input;
    } else {
      outputs[i].assign(OutputBytes(request, i, member), 99);
    }
    operation->buffers.push_back(
        {request.in_place ? outputs[i].data() : input.data(), outputs[i].data()});
  }
  operation->allocate = [&](size_t tensor, const std::vector<int64_t>& rows) -> void* {
    if (fails) return nullptr;
    outputs[tensor].assign(std::accumulate(rows.begin(), rows.end(), int64_t{0}) *
                               RowBytes(description->tensors[tensor]),
                           99);
    return outputs[tensor].data();
  };
  operation->description = description;
  Batch batch;
  batch.push_back(std::move(operation));
  Tuning tuning;
  tuning.window_bytes = request.window_bytes;
  tuning.small_bytes = request.small_bytes;
  tuning.halving_hosts = halving_hosts;
  EXPECT_EQ(backend->Run(batch, tuning), succeeds);
  return outputs;
}

// ---- Right results

std::vector<const void*> Pointers(const std::vector<Tensors>& inputs, size_t tensor,
                                  const std::vector<int>& members) {
  std::vector<const void*> pointers;
  for (int member : members) pointers.push_back(inputs[member][tensor].data());
  return pointers;
}

// The members on each host, in the order of the hosts' numbers.
std::vector<std::vector<int>> MembersByHost(const Topology& topology,
                                            const std::vector<int>& members) {
  std::vector<std::vector<int>> by_host(topology.hosts());
  for (size_t member = 0; member < members.size(); ++member) {
    by_host[topology.host_of(members[member])].push_back(static_cast<int>(member));
  }
  by_host.erase(std::remove_if(by_host.begin(), by_host.end(),
                               [](const auto& of_host) { return of_host.empty(); }),
                by_host.end());
  return by_host;
}

Buffer Combined(const Reduction& reduction, DataType dtype,
                const std::vector<const void*>& inputs, int64_t bytes) {
  Buffer result(bytes);
  Reduce(reduction, dtype, inputs.data(), static_cast<int>(inputs.size()),
         bytes / Bytes(dtype), result.data());
  return result;
}

// The sum of the first hosts, a power of two of them, and that of the others.
Buffer InPairs(const Reduction& reduction, DataType dtype,
               const std::vector<const void*>& hosts, int64_t bytes) {
  if (hosts.size() == 1) {
    return Combined({reduction.op, reduction.prescale}, dtype, hosts, bytes);
  }
  size_t first = 1;
  while (first * 2 < hosts.size()) first *= 2;
  const auto middle = hosts.begin() + first;
  const Reduction without_post = {reduction.op, reduction.prescale};
  const Buffer one = InPairs(without_post, dtype, {hosts.begin(), middle}, bytes);
  const Buffer other = InPairs(without_post, dtype, {middle, hosts.end()}, bytes);
  return Combined({reduction.op, 1, reduction.postscale}, dtype,
                  {one.data(), other.data()}, bytes);
}

// Floats are reduced on each host and then from host to host, those of 32 and 64 bits
// in pairs of hosts. All else is reduced in one step, as on one host; if each host has
// one member, in the order of the hosts.
Buffer Reduced(const Request& request, size_t tensor, const Topology& topology,
               const std::vector<int>& members) {
  const Reduction& whole = request.description.reduction;
  const DataType dtype = request.description.tensors[tensor].dtype;
  const int64_t bytes = request.inputs[0][tensor].size();
  const int count = static_cast<int>(members.size());
  Buffer result(bytes);
  const auto by_host = MembersByHost(topology, members);
  const bool one_each = by_host.size() == members.size();
  const bool pairs = IsFloating(dtype) && Bytes(dtype) >= 4;
  if (!IsFloating(dtype) || (one_each && !pairs) || by_host.size() == 1) {
    std::vector<int> all;
    for (const auto& here : by_host) all.insert(all.end(), here.begin(), here.end());
    if (!one_each) std::sort(all.begin(), all.end());
    Reduce(whole, dtype, Pointers(request.inputs, tensor, all).data(), count,
           bytes / Bytes(dtype), result.data());
    return result;
  }
  const bool averages = whole.op == ReduceOp::kAverage;
  const ReduceOp op = averages ? ReduceOp::kSum : whole.op;
  const double early = averages && Bytes(dtype) < 4 ? 1.0 / count : 1;
  const double late =
      averages && Bytes(dtype) >= 4 ? whole.postscale / count : whole.postscale;
  std::vector<Buffer> of_hosts;
  std::vector<const void*> pointers;
  for (const std::vector<int>& here : by_host) {
    const auto inputs = Pointers(request.inputs, tensor, here);
    of_hosts.push_back(Combined({op, whole.prescale, early}, dtype, inputs, bytes));
  }
  for (const Buffer& sum : of_hosts) pointers.push_back(sum.data());
  return (pairs ? InPairs : Combined)({op, 1, late}, dtype, pointers, bytes);
}

Buffer Rows(const Buffer& tensor, int64_t begin, int64_t end, int64_t row_bytes) {
  return {tensor.begin() + begin * row_bytes, tensor.begin() + end * row_bytes};
}

std::vector<Tensors> Expected(const Request& request, const Topology& topology,
                              const std::vector<int>& members) {
  const int count = static_cast<int>(members.size());
  std::vector<Tensors> expected(count);
  for (size_t i = 0; i < request.description.tensors.size(); ++i) {
    const int64_t row_bytes = RowBytes(request.description.tensors[i]);
    Buffer whole;
    if (Reduces(request.description.kind)) {
      whole = Reduced(request, i, topology, members);
    } else if (request.description.kind == Kind::kAllgather) {
      for (const Tensors& inputs : request.inputs) {
        whole.insert(whole.end(), inputs[i].begin(), inputs[i].end());
      }
    } else if (request.description.kind == Kind::kBroadcast) {
      const auto root =
          std::lower_bound(members.begin(), members.end(), request.description.root);
      whole = request.inputs[root - members.begin()][i];
    }
    for (int member = 0; member < count; ++member) {
      if (request.description.kind == Kind::kReducescatter) {
        const int64_t rows = request.description.tensors[i].shape.front();
        expected[member].push_back(Rows(whole, PartStart(rows, member, count),
                                        PartStart(rows, member + 1, count), row_bytes));
      } else if (request.description.kind == Kind::kAlltoall) {
        Buffer& own = expected[member].emplace_back();
        for (int peer = 0; peer < count; ++peer) {
          const auto& splits = request.splits[peer];
          const int64_t begin =
              std::accumulate(splits.begin(), splits.begin() + member, int64_t{0});
          const Buffer part =
              Rows(request.inputs[peer][i], begin, begin + splits[member], row_bytes);
          own.insert(own.end(), part.begin(), part.end());
        }
      } else {
        expected[member].push_back(whole);
      }
    }
  }
  for (int member : request.without_memory) {
    expected[member].assign(expected[member].size(), {});
  }
  return expected;
}

std::string Text(const Request& request, const Topology& topology,
                 const std::vector<int>& members) {
  std::string text = Details(request.description) + " on hosts";
  for (int rank : members) text += " " + std::to_string(topology.host_of(rank));
  return text;
}

void Check(HostsJob* job, const std::vector<int>& members, const Request& request) {
  std::vector<Tensors> outputs(members.size());
  job->Run(members, [&](int rank, CollectiveBackend* backend) {
    const int member = static_cast<int>(
        std::lower_bound(members.begin(), members.end(), rank) - members.begin());
    outputs[member] = Carry(request, member, backend);
  });
  const std::vector<Tensors> expected = Expected(request, job->topology(), members);
  for (size_t member = 0; member < members.size(); ++member) {
    for (size_t i = 0; i < expected[member].size(); ++i) {
      ASSERT_TRUE(outputs[member][i] == expected[member][i])
          << Text(request, job->topology(), members) << ", tensor " << i
          << " of member " << member;
    }
  }
}

void Check(HostsJob* job, const Request& request) { Check(job, job->all(), request); }

// ---- Layouts

struct Layout {
  const char* name;
  std::vector<int> hosts;
  int socket_bytes = 0;
  int connections = 1;
  Carrier carrier = Carrier::kSockets;
  int64_t halving_hosts = kHalvingHosts;

  HostsOptions Options(int64_t exchange_bytes) const {
    return {exchange_bytes, socket_bytes, connections, carrier};
  }
};

Layout Halving(const char* name, const std::vector<int>& hosts, int socket_bytes = 0,
               int connections = 1, Carrier carrier = Carrier::kSockets) {
  return {name, hosts, socket_bytes, connections, carrier, kLeastHalvingHosts};
}

const Layout kLayouts[] = {
    {"TwoOfOne", {0, 1}},
    {"TwoOfTwo", {0, 0, 1, 1}},
    {"TwoMixed", {0, 1, 1, 0}},
    {"TwoUneven", {0, 1, 0, 0}},
    {"UnevenTheOtherWay", {0, 1, 1}},
    {"ThreeOfOne", {0, 1, 2}},
    {"ThreeUneven", {0, 1, 2, 0, 2, 2}},
    {"FourOfOne", {0, 1, 2, 3}},
    {"FourOfTwo", {0, 1, 2, 3, 3, 2, 1, 0}},
    {"FourUneven", {0, 1, 1, 2, 3, 1, 3}},
    // The least buffers that the system gives.
    {"SlowUneven", {0, 1, 1, 2}, 1},
    {"SlowTwoOfTwo", {0, 0, 1, 1}, 1},
    {"ThreeConnections", {0, 1, 1, 2}, 0, 3},
    {"SlowTwoConnections", {0, 0, 1, 1}, 1, 2},
    {"MpiTwoOfOne", {0, 1}, 0, 1, Carrier::kMpiWithPointers},
    {"MpiTwoMixed", {0, 1, 1, 0}, 0, 1, Carrier::kMpiWithInts},
    {"MpiTwoUneven", {0, 1, 0, 0}, 0, 1, Carrier::kMpiWithPointers},
    {"MpiThreeUneven", {0, 1, 2, 0, 2, 2}, 0, 1, Carrier::kMpiWithInts},
    {"MpiFourOfTwo", {0, 1, 2, 3, 3, 2, 1, 0}, 0, 1, Carrier::kMpiWithPointers},
    {"MpiFourUneven", {0, 1, 1, 2, 3, 1, 3}, 0, 1, Carrier::kMpiWithPointers},
    Halving("HalvingThreeOfOne", {0, 1, 2}),
    Halving("HalvingFourOfTwo", {0, 1, 2, 3, 3, 2, 1, 0}),
    Halving("HalvingFiveUneven", {0, 1, 1, 2, 3, 1, 4, 4}),
    Halving("HalvingSevenOfOne", {0, 1, 2, 3, 4, 5, 6}),
    Halving("HalvingThirteen", {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 12}),
    Halving("HalvingSlowSix", {0, 1, 2, 3, 4, 5, 5}, 1),
    Halving("HalvingTwoConnections", {0, 1, 2, 2}, 0, 2),
    Halving("HalvingMpiSeven", {0, 1, 2, 3, 4, 5, 6, 6}, 0, 1,
            Carrier::kMpiWithPointers),
};

class HostsTest : public testing::TestWithParam<Layout> {
 protected:
  HostsTest()
      : job_(GetParam().hosts, GetParam().Options(kTinyExchange)),
        members_(job_.size()) {
    halving_hosts = GetParam().halving_hosts;
  }
  ~HostsTest() override { halving_hosts = kHalvingHosts; }

  HostsJob job_;
  const int members_;
  std::mt19937 random_{11};
};

INSTANTIATE_TEST_SUITE_P(Layouts, HostsTest, testing::ValuesIn(kLayouts),
                         [](const auto& info) { return info.param.name; });

// ---- Allreduce

// Sizes around the cache line, the limit of small tensors, and one and several windows
// of 2 KiB.
const std::vector<int64_t> kSizes = {0,   1,    3,    16,   17,   511,  512,
                                     513, 1025, 1536, 2047, 4097, 20011};

TEST_P(HostsTest, AllreduceOfAllSizes) {
  for (int64_t elements : kSizes) {
    for (bool in_place : {false, true}) {
      for (DataType dtype : {DataType::kInt32, DataType::kFloat32}) {
        Request request =
            GroupRequest(Kind::kAllreduce, {{dtype, elements}}, members_, elements);
        request.description.reduction.op = ReduceOp::kAverage;
        request.in_place = in_place;
        Check(&job_, request);
      }
    }
  }
}

TEST_P(HostsTest, AllreduceOfAllTypesAndReductions) {
  for (int dtype = 0; dtype < kReducedDataTypes; ++dtype) {
    for (int op = 0; op < kElementReduceOps; ++op) {
      for (double prescale : {1.0, 0.7}) {
        for (double postscale : {1.0, 1.3}) {
          const Reduction reduction = {static_cast<ReduceOp>(op), prescale, postscale};
          if (!Supports(reduction, static_cast<DataType>(dtype))) continue;
          Request request =
              GroupRequest(Kind::kAllreduce, {{static_cast<DataType>(dtype), 1501}},
                           members_, dtype * 100 + op);
          request.description.reduction = reduction;
          request.in_place = op % 2 == 0;
          Check(&job_, request);
        }
      }
    }
  }
}

// Exact results are the same on any hosts, in every type.
TEST_P(HostsTest, AllreduceOfSmallNumbersIsThatOfOneHost) {
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
    const Request pattern = GroupRequest(
        Kind::kAllreduce, {{DataType::kFloat64, 3000}, {DataType::kFloat32, 5}},
        members_, 1);
    Request request = pattern;
    request.description.reduction.op = op;
    Buffer expected(3000 * sizeof(double));
    std::vector<double> sums(3000);
    for (int member = 0; member < members_; ++member) {
      const auto numbers = SmallNumbers<double>(3000, member);
      memcpy(request.inputs[member][0].data(), numbers.data(), expected.size());
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += numbers[i];
    }
    if (op == ReduceOp::kAverage) {
      for (double& sum : sums) sum *= 1.0 / members_;
    }
    memcpy(expected.data(), sums.data(), expected.size());
    job_.Run(job_.all(), [&](int rank, CollectiveBackend* backend) {
      EXPECT_TRUE(Carry(request, rank, backend)[0] == expected);
    });
  }
}

TEST_P(HostsTest, AllreduceOfMixedGroups) {
  for (int round = 0; round < 20; ++round) {
    Group group;
    for (unsigned i = 0; i < 1 + random_() % 30; ++i) {
      group.push_back({RandomNumberType(&random_),
                       static_cast<int64_t>(random_() % 3 == 0 ? random_() % 3000
                                                               : random_() % 40)});
    }
    Request request = GroupRequest(Kind::kAllreduce, group, members_, round);
    request.description.reduction = {
        round % 3 == 0 ? ReduceOp::kAverage : ReduceOp::kSum,
        round % 5 == 0 ? 0.3 : 1.0, 1};
    request.in_place = round % 2 == 0;
    Check(&job_, request);
  }
}

TEST_P(HostsTest, AllreduceWithWindowsAndSmallTensorsOfAllSizes) {
  HostsJob job(GetParam().hosts, GetParam().Options(1 << 18));
  for (int64_t small : {int64_t{0}, int64_t{2} << 10, INT64_MAX}) {
    for (int64_t window : {kCacheLine, 100 * kCacheLine, int64_t{4} << 20}) {
      for (int64_t elements : {1, 1025, 10007, 300000}) {
        if (elements * 4 > 200 * window) continue;
        Request request = GroupRequest(
            Kind::kAllreduce, {{DataType::kFloat32, elements}}, members_, elements);
        request.small_bytes = small;
        request.window_bytes = window;
        for (bool in_place : {false, true}) {
          request.in_place = in_place;
          Check(&job, request);
        }
      }
    }
  }
}

// On slow connections, where a rank may have all it needs before it has sent all.
TEST(HostsInPlaceTest, ResultsLeaveWhatIsBeingSent) {
  const std::pair<std::vector<int>, DataType> cases[] = {
      {{0, 1, 1, 2}, DataType::kFloat32}, {{0, 0, 1, 1}, DataType::kInt32}};
  for (const auto& [hosts, dtype] : cases) {
    HostsJob job(hosts, {1 << 18, 1});
    for (int round = 0; round < 40; ++round) {
      Request request = GroupRequest(Kind::kAllreduce, {{dtype, 16000}}, 4, round);
      request.description.reduction.op = ReduceOp::kAverage;
      request.small_bytes = INT64_MAX;
      request.in_place = true;
      Check(&job, request);
    }
  }
}

// ---- Adasum

TEST_P(HostsTest, AdasumGivesTheBitsOfOneHost) {
  if (!CanAdasum(members_)) GTEST_SKIP() << "needs a power of two";
  Group group;
  for (DataType dtype : {DataType::kFloat16, DataType::kFloat32, DataType::kFloat64,
                         DataType::kBfloat16, DataType::kFloat8E4m3fn}) {
    for (int64_t elements : {0, 1, 7, 3001}) group.push_back({dtype, elements});
  }
  Request request = GroupRequest(Kind::kAllreduce, group, members_, 3);
  request.description.reduction = {ReduceOp::kAdasum, 0.5, 3};
  for (bool in_place : {false, true}) {
    request.in_place = in_place;
    std::vector<Tensors> here(members_), across(members_);
    HostsJob one_host(std::vector<int>(members_, 0));
    for (auto [job, outputs] : {std::pair(&one_host, &here), {&job_, &across}}) {
      job->Run(job->all(), [&, to = outputs](int rank, CollectiveBackend* backend) {
        (*to)[rank] = Carry(request, rank, backend);
      });
    }
    for (const Tensors& outputs : across) EXPECT_TRUE(outputs == here[0]);
  }
}

// ---- Allgather

Request AllgatherRequest(const Group& group, int members, std::mt19937* random) {
  Request request = GroupRequest(Kind::kAllgather, group, 0, 0);
  for (TensorDescription& tensor : request.description.tensors) tensor.shape[0] = -1;
  for (int member = 0; member < members; ++member) {
    request.inputs.emplace_back();
    request.rows.emplace_back();
    for (const Shape& shape : group) {
      const int64_t rows = shape.rows == 0 ? 0 : (*random)() % (shape.rows + 1);
      request.rows.back().push_back(rows);
      request.inputs.back().push_back(
          RandomBytes(rows * shape.row_bytes(), (*random)()));
    }
  }
  return request;
}

TEST_P(HostsTest, AllgatherOfAllSizes) {
  for (int64_t rows : {0, 1, 2, 100, 1000, 30000}) {
    for (int64_t row_elements : {0, 1, 3}) {
      Check(&job_, AllgatherRequest({{DataType::kUint8, rows, row_elements}}, members_,
                                    &random_));
    }
  }
}

TEST_P(HostsTest, AllgatherOfMixedGroups) {
  for (int round = 0; round < 10; ++round) {
    Group group;
    for (unsigned i = 0; i < 1 + random_() % 20; ++i) {
      group.push_back({static_cast<DataType>(random_() % kDataTypes),
                       static_cast<int64_t>(random_() % 500),
                       static_cast<int64_t>(random_() % 4)});
    }
    Check(&job_, AllgatherRequest(group, members_, &random_));
  }
}

TEST_P(HostsTest, AllgatherReachesOthersIfAMemberHasNoMemory) {
  for (int member = 0; member < members_; ++member) {
    Request request = AllgatherRequest({{DataType::kInt32, 3000}, {DataType::kInt8, 7}},
                                       members_, &random_);
    request.without_memory = {member};
    Check(&job_, request);
    for (int other = 0; other < members_; other += 2) {
      request.without_memory.push_back(other);
    }
    Check(&job_, request);
  }
}

// ---- Broadcast

TEST_P(HostsTest, BroadcastFromEveryRoot) {
  for (int root = 0; root < members_; ++root) {
    for (int64_t bytes : {0, 1, 5, 4096, 4097, 65536, 65537, 300001}) {
      Request request =
          GroupRequest(Kind::kBroadcast, {{DataType::kInt8, bytes}}, members_, bytes);
      request.description.root = root;
      request.in_place = root % 2 == 0;
      Check(&job_, request);
    }
  }
}

// ---- Reducescatter

TEST_P(HostsTest, ReducescatterOfAllSizes) {
  for (int64_t rows : {0, 1, 2, 3, 5, 17, 1000, 10007}) {
    for (int64_t row_elements : {0, 1, 3, 16}) {
      Check(&job_,
            GroupRequest(Kind::kReducescatter,
                         {{DataType::kFloat32, rows, row_elements}}, members_, rows));
    }
  }
}

TEST_P(HostsTest, ReducescatterInSeveralWindows) {
  Request request = GroupRequest(Kind::kReducescatter,
                                 {{DataType::kFloat32, 1000003, 1},
                                  {DataType::kInt8, 100},
                                  {DataType::kInt32, 100000, 1}},
                                 members_, 5);
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
    request.description.reduction.op = op;
    Check(&job_, request);
  }
}

TEST_P(HostsTest, ReducescatterOfAllTypesAndReductions) {
  for (int dtype = 0; dtype < kReducedDataTypes; ++dtype) {
    for (int op = 0; op < kElementReduceOps; ++op) {
      for (double scale : {1.0, 0.7}) {
        const Reduction reduction = {static_cast<ReduceOp>(op), scale, 2 * scale};
        if (!Supports(reduction, static_cast<DataType>(dtype))) continue;
        Request request =
            GroupRequest(Kind::kReducescatter, {{static_cast<DataType>(dtype), 301, 3}},
                         members_, dtype * 100 + op);
        request.description.reduction = reduction;
        Check(&job_, request);
      }
    }
  }
}

TEST_P(HostsTest, ReducescatterOfMixedGroups) {
  for (int round = 0; round < 15; ++round) {
    Group group;
    for (unsigned i = 0; i < 1 + random_() % 20; ++i) {
      group.push_back({RandomNumberType(&random_),
                       static_cast<int64_t>(random_() % 500),
                       static_cast<int64_t>(random_() % 6)});
    }
    Request request = GroupRequest(Kind::kReducescatter, group, members_, round);
    request.description.reduction.op =
        round % 2 == 0 ? ReduceOp::kAverage : ReduceOp::kSum;
    Check(&job_, request);
  }
}

// ---- Alltoall

Request AlltoallRequest(int64_t most, int64_t row_elements, int members,
                        std::mt19937* random) {
  const Shape shape = {DataType::kInt32, most, row_elements};
  Request request = GroupRequest(Kind::kAlltoall, {shape}, 0, 0);
  request.description.tensors.front().shape[0] = -1;
  for (int member = 0; member < members; ++member) {
    std::vector<int64_t>& splits = request.splits.emplace_back();
    for (int peer = 0; peer < members; ++peer) {
      splits.push_back((*random)() % 4 == 0 ? 0 : (*random)() % (most + 1));
    }
    const int64_t rows = std::accumulate(splits.begin(), splits.end(), int64_t{0});
    request.rows.push_back({rows});
    request.inputs.push_back({RandomBytes(rows * shape.row_bytes(), (*random)())});
  }
  return request;
}

TEST_P(HostsTest, AlltoallOfAllSizes) {
  for (int64_t most : {0, 1, 10, 1000, 20000}) {
    for (int64_t row_elements : {0, 1, 3}) {
      Request request = AlltoallRequest(most, row_elements, members_, &random_);
      Check(&job_, request);
      request.without_memory = {static_cast<int>(random_() % members_)};
      Check(&job_, request);
    }
  }
}

// ---- Barrier, values, hashes, attempts

TEST_P(HostsTest, NobodyLeavesABarrierBeforeAllHaveEntered) {
  Request request = GroupRequest(Kind::kBarrier, {}, members_, 0);
  for (int late = 0; late < members_; ++late) {
    std::atomic<int> entered{0};
    job_.Run(job_.all(), [&](int rank, CollectiveBackend* backend) {
      // The last one enters when nobody else will move any more.
      for (int i = 0; rank == late && i < 200; ++i) sched_yield();
      ++entered;
      Carry(request, rank, backend);
      EXPECT_EQ(entered.load(), members_);
    });
  }
}

TEST_P(HostsTest, ValuesAndHashesReachAll) {
  for (size_t length : {0, 1, 3, 2000}) {
    const auto own = [&](int rank) { return SmallNumbers<int64_t>(length, rank); };
    const auto hashes = [&](int rank) { return SmallNumbers<uint64_t>(length, -rank); };
    const Request request =
        GroupRequest(Kind::kAllreduce, {{DataType::kInt32, 2000}}, members_, length);
    job_.Run(job_.all(), [&](int rank, CollectiveBackend* backend) {
      std::vector<std::vector<int64_t>> values;
      EXPECT_TRUE(backend->AllgatherValues(own(rank), &values));
      EXPECT_TRUE(backend->BeginAgain());
      Carry(request, rank, backend);
      std::vector<std::vector<uint64_t>> all;
      EXPECT_TRUE(backend->AllgatherHashes(hashes(rank), &all));
      ASSERT_EQ(values.size(), static_cast<size_t>(members_));
      ASSERT_EQ(all.size(), static_cast<size_t>(members_));
      for (int member = 0; member < members_; ++member) {
        EXPECT_EQ(values[member], own(member));
        EXPECT_EQ(all[member], hashes(member));
      }
    });
  }
}

TEST_P(HostsTest, AnAttemptSucceedsOnAllOrOnNone) {
  using Outcome = JointAttempt::Outcome;
  for (int first_to_fail = -1; first_to_fail < members_; ++first_to_fail) {
    for (int second : {first_to_fail, members_ - 1}) {
      job_.Run(job_.all(), [&](int rank, CollectiveBackend* backend) {
        const bool fails =
            first_to_fail >= 0 && (rank == first_to_fail || rank == second);
        const auto attempt = backend->Attempt();
        Outcome outcome = fails ? Outcome::kFailed : Outcome::kSucceeded;
        if (first_to_fail >= 0 && !fails) {
          while (!attempt->HasFailedElsewhere()) sched_yield();
          outcome = Outcome::kLeft;
        }
        if (first_to_fail < 0) {
          EXPECT_FALSE(attempt->HasFailedElsewhere());
        }
        int failed = -2;
        EXPECT_TRUE(attempt->Conclude(outcome, &failed));
        EXPECT_EQ(failed, first_to_fail);
      });
    }
  }
}

// ---- One after another

Request RandomRequest(const std::vector<int>& ranks, std::mt19937* random) {
  const int members = static_cast<int>(ranks.size());
  const auto most = [&] { return (*random)() % 4 == 0 ? 6000 : 60; };
  switch ((*random)() % 6) {
    case 0: return AllgatherRequest({{DataType::kInt16, most(), 2}}, members, random);
    case 1: return AlltoallRequest(most(), 1, members, random);
    case 2: {
      Request request =
          GroupRequest(Kind::kBroadcast,
                       {{DataType::kInt8, static_cast<int64_t>((*random)() % 100000)}},
                       members, (*random)());
      request.description.root = ranks[(*random)() % members];
      return request;
    }
    case 3:
      return GroupRequest(Kind::kReducescatter, {{RandomNumberType(random), most(), 2}},
                          members, (*random)());
    case 4: return GroupRequest(Kind::kBarrier, {}, members, 0);
    default: {
      Group group;
      for (unsigned i = 0; i < 1 + (*random)() % 3; ++i) {
        group.push_back({RandomNumberType(random), most()});
      }
      Request request = GroupRequest(Kind::kAllreduce, group, members, (*random)());
      request.description.reduction.op =
          (*random)() % 2 == 0 ? ReduceOp::kSum : ReduceOp::kAverage;
      request.in_place = (*random)() % 2 == 0;
      return request;
    }
  }
}

// Each rank is at its own pace: sets overlap, and nobody waits in between.
TEST_P(HostsTest, CollectivesOfAnySetsFollowEachOther) {
  struct Planned {
    std::vector<int> members;
    Request request;
  };
  std::deque<Planned> plan;
  for (int number = 0; number < 120; ++number) {
    std::vector<int> members;
    while (members.empty()) {
      for (int rank = 0; rank < members_; ++rank) {
        if (random_() % 3 != 0) members.push_back(rank);
      }
    }
    plan.push_back({members, RandomRequest(members, &random_)});
  }
  std::vector<std::vector<Tensors>> outputs(members_,
                                            std::vector<Tensors>(plan.size()));
  job_.RunThreads(job_.all(), [&](int rank) {
    std::mt19937 pace(rank);
    uint64_t sequence = 0;
    for (size_t number = 0; number < plan.size(); ++number) {
      const auto& [members, request] = plan[number];
      ++sequence;
      const auto member = std::lower_bound(members.begin(), members.end(), rank);
      if (member == members.end() || *member != rank) continue;
      for (unsigned i = 0; i < pace() % 50; ++i) sched_yield();
      CollectiveBackend& backend = job_.backend(rank);
      EXPECT_TRUE(backend.Begin(members, sequence));
      outputs[rank][number] =
          Carry(request, static_cast<int>(member - members.begin()), &backend);
      backend.End();
    }
  });
  for (size_t number = 0; number < plan.size(); ++number) {
    const auto& [members, request] = plan[number];
    const std::vector<Tensors> expected = Expected(request, job_.topology(), members);
    for (size_t member = 0; member < members.size(); ++member) {
      ASSERT_TRUE(outputs[members[member]][number] == expected[member])
          << number << ": " << Text(request, job_.topology(), members) << ", member "
          << member;
    }
  }
}

// ---- Bytes sent

// The bytes from rank 0 to one other host, in an allreduce over `hosts` hosts of one
// rank.
int64_t SentByAllreduce(int hosts, int64_t bytes) {
  std::vector<int> ranks(hosts);
  std::iota(ranks.begin(), ranks.end(), 0);
  HostsJob job(ranks, {4 << 20});
  Check(&job,
        GroupRequest(Kind::kAllreduce, {{DataType::kFloat32, bytes / 4}}, hosts, 1));
  return job.Sent(0, 1);
}

TEST(HostsTrafficTest, SmallTensorsTravelWholeWhereThatIsHardlyMore) {
  EXPECT_EQ(SentByAllreduce(2, 128 << 10), 128 << 10);
  EXPECT_EQ(SentByAllreduce(4, 16 << 10), 16 << 10);
  EXPECT_EQ(SentByAllreduce(8, 4 << 10), 4 << 10);
}

// The largest parts to the nearest host, and nothing to most others.
TEST(HostsTrafficTest, ManyHostsExchangeWithFew) {
  HostsJob job({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {4 << 20});
  Check(&job, GroupRequest(Kind::kAllreduce, {{DataType::kFloat32, 16 << 10}}, 12, 1));
  const int64_t bytes[] = {0, 64 << 10, 32 << 10, 0, 16 << 10, 0, 0, 0, 8 << 10};
  for (int host = 1; host < 12; ++host) {
    EXPECT_EQ(job.Sent(0, host), host < 9 ? bytes[host] : 0) << host;
  }
}

// Narrow floats would be rounded on the way.
TEST(HostsTrafficTest, NarrowFloatsTravelDirectlyEvenBetweenMany) {
  std::vector<int> ranks(12);
  std::iota(ranks.begin(), ranks.end(), 0);
  HostsJob job(ranks, {4 << 20});
  Check(&job,
        GroupRequest(Kind::kAllreduce,
                     {{DataType::kFloat16, 24 << 10}, {DataType::kFloat32, 1}}, 12, 1));
  for (int host = 1; host < 12; ++host) EXPECT_GT(job.Sent(0, host), 0) << host;
}

TEST(HostsTrafficTest, OthersTravelInPartsWhichReturnReduced) {
  EXPECT_EQ(SentByAllreduce(2, 256 << 10), 256 << 10);
  EXPECT_EQ(SentByAllreduce(4, 64 << 10), 2 * (16 << 10));
  EXPECT_EQ(SentByAllreduce(8, 16 << 10), 2 * (2 << 10));
}

// Nobody sends anything, so no more than the first eight turns begin: one to each other
// host, and the next window's first.
TEST(HostsTrafficTest, AHostSendsInTurns) {
  std::vector<int> ranks(8);
  std::iota(ranks.begin(), ranks.end(), 0);
  HostsJob job(ranks, {4 << 20});
  const Request request =
      GroupRequest(Kind::kAllreduce, {{DataType::kFloat32, 1 << 20}}, 8, 1);
  job.RunThreads({0, 1}, [&](int rank) {
    if (rank == 0) {
      ASSERT_TRUE(job.backend(0).Begin(ranks, 1));
      Carry(request, 0, &job.backend(0), /*succeeds=*/false);
      return;
    }
    // More than rank 0 needs to fill the sockets.
    poll(nullptr, 0, 500);
    job.job(1).Fail(Code::kInternal, "nobody takes part");
  });
  const int64_t turn = 48 << 10;
  for (int host = 1; host < 8; ++host) {
    EXPECT_LE(job.Sent(0, host), host == 1 ? 2 * turn : turn) << host;
  }
  EXPECT_GT(job.Sent(0, 1), 0);
}

// ---- Process sets of all kinds

TEST(HostsSetsTest, SetsOfAllKinds) {
  HostsJob job({0, 0, 1, 1, 1, 0});
  const std::vector<std::vector<int>> sets = {
      {0, 1, 5},          // one host
      {2, 3, 4}, {1, 2},  // one member on each
      {0, 4},    {5, 4},  // with different local indexes
      {0, 1, 4}, {3},    {0, 1, 2, 3, 4, 5}};
  std::mt19937 random(1);
  for (const std::vector<int>& each : sets) {
    std::vector<int> members = each;
    std::sort(members.begin(), members.end());
    for (int i = 0; i < 10; ++i) Check(&job, members, RandomRequest(members, &random));
  }
}

bool HasChosen(const RankBlock& block) {
  return std::any_of(block.stores.begin(), block.stores.end(),
                     [](const auto& stores) { return stores.load() != 0; });
}

// After a few allreduces it tries each kind of stores; the tensor takes many windows.
TEST(HostsSetsTest, OfASetTheFirstMemberOnEachHostChoosesTheStores) {
  for (const std::vector<int>& members :
       {std::vector<int>{3, 4}, {0, 1, 3, 4}, {1, 2, 3, 4}}) {
    HostsJob job({0, 0, 1, 1, 1});
    const Request request = GroupRequest(
        Kind::kAllreduce, {{DataType::kFloat32, 300001}}, members.size(), 1);
    std::vector<int> tried(5);
    for (int i = 0; i < 10; ++i) {
      Check(&job, members, request);
      for (int rank = 0; rank < 5; ++rank) tried[rank] += HasChosen(job.block(rank));
    }
    for (int rank = 0; rank < 5; ++rank) {
      const auto on_host = [&](int member) { return (member < 2) == (rank < 2); };
      const auto first = std::find_if(members.begin(), members.end(), on_host);
      const bool chooses = first != members.end() && *first == rank;
      EXPECT_EQ(tried[rank] > 0, chooses) << rank << " of " << members.size();
    }
  }
}

// A set's hosts are taken in the order of their numbers, not of its ranks.
TEST(HostsSetsTest, HostsAreReducedInTheOrderOfTheirNumbers) {
  HostsJob job({0, 1, 2, 2, 1, 0});
  const std::vector<int> members = {2, 3, 4, 5};
  Request request = GroupRequest(Kind::kAllreduce, {{DataType::kFloat32, 1}}, 4, 0);
  // (1 + 1e8) + -1e8 is 0; in another order it is 1.
  const std::vector<float> values = {-1e8f, 0, 1e8f, 1};
  for (int member = 0; member < 4; ++member) {
    memcpy(request.inputs[member][0].data(), &values[member], sizeof(float));
  }
  job.Run(members, [&](int rank, CollectiveBackend* backend) {
    float sum;
    const Tensors outputs = Carry(request, rank - 2, backend);
    memcpy(&sum, outputs[0].data(), sizeof(sum));
    EXPECT_EQ(sum, 0);
  });
}

// ---- Death

// One rank closes its connections, as its death would, before a collective that needs
// it. Returns the end of the job.
Status EndWithout(
    int dead, const Request& request, HostsJob* job,
    const std::function<void()>& once_dead = [] {}) {
  job->RunThreads(job->all(), [&](int rank) {
    CollectiveBackend& backend = job->backend(rank);
    ASSERT_TRUE(backend.Begin(job->all(), 1));
    std::vector<std::vector<int64_t>> values;
    EXPECT_TRUE(backend.AllgatherValues({rank}, &values));
    if (rank == dead) {
      job->Kill(rank);
      return once_dead();
    }
    if (backend.BeginAgain()) Carry(request, rank, &backend, /*succeeds=*/false);
  });
  return job->job(0).Failure();
}

// Every rank has one on the other host that needs it.
TEST(HostsDeathTest, ADeadRankIsNamedAfterAMoment) {
  const Group group = {{DataType::kFloat32, 30000}};
  Request gather = GroupRequest(Kind::kAllgather, group, 4, 0);
  gather.rows.assign(4, {30000});
  Request exchange = GroupRequest(Kind::kAlltoall, group, 4, 0);
  exchange.splits.assign(4, {10000, 10000, 5000, 5000});
  int dead = 0;
  for (const Request& request :
       {gather, exchange, GroupRequest(Kind::kAllreduce, group, 4, 0),
        GroupRequest(Kind::kReducescatter, group, 4, 0),
        GroupRequest(Kind::kBarrier, {}, 4, 0)}) {
    HostsJob job({0, 1, 1, 0});
    dead = (dead + 1) % 4;
    const Clock::time_point start = Clock::now();
    const Status failure = EndWithout(dead, request, &job);
    EXPECT_EQ(failure.code, Code::kRankFailed);
    const std::string what =
        "the connection to " + job.job(0).Describe(dead) + " has ended: ";
    EXPECT_EQ(failure.message.substr(0, what.size()), what) << failure.message;
    EXPECT_GT(Clock::now() - start, std::chrono::milliseconds(900));
  }
}

TEST(HostsDeathTest, ItsHostKnowsBetterWhyItDied) {
  HostsJob job({0, 1, 1, 2});
  const Request request =
      GroupRequest(Kind::kAllreduce, {{DataType::kFloat32, 100000}}, 4, 0);
  const Status failure = EndWithout(2, request, &job, [&] {
    // Time for the others to see the end of their connections.
    poll(nullptr, 0, 100);
    job.job(1).Fail(Code::kRankFailed, "rank 2 was killed");
  });
  EXPECT_EQ(failure.message, "rank 2 was killed");
}

}  // namespace
}  // namespace keras_hvd

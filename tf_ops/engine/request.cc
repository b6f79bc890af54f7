#include "tf_ops/engine/request.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "tf_ops/collectives/adasum.h"
#include "tf_ops/collectives/parts.h"

namespace keras_hvd {

Status WrongRequest(const khvd_request& request, const std::string& text) {
  const char* name = request.name == nullptr ? "" : request.name;
  return Status::InvalidArgument(Quoted(name) + ": " + text);
}

Membership MembershipIn(const std::vector<int>& ranks, int rank) {
  const int index = IndexOf(ranks, rank);
  if (index < 0) return {};
  return {index, static_cast<int>(ranks.size())};
}

int64_t ScatteredRows(const Membership& membership, int64_t rows) {
  if (membership.members == 0) return 0;
  return PartSize(rows, membership.index, membership.members);
}

namespace {

Status WrongSum(const khvd_request& request, const std::vector<int64_t>& splits,
                int64_t rows) {
  std::string text;
  for (int64_t split : splits)
    text += (text.empty() ? "" : ", ") + std::to_string(split);
  return WrongRequest(request, "the splits, " + text +
                                   ", do not add up to the tensor's " +
                                   std::to_string(rows) + " rows");
}

Status CheckRequest(const khvd_request& request, int size) {
  if (request.struct_size < sizeof(khvd_request)) {
    return WrongRequest(request,
                        "the caller was built for another version of keras_hvd");
  }
  if (request.name == nullptr || request.name[0] == '\0') {
    return WrongRequest(request, "a request needs a name");
  }
  if (request.kind < 0 || request.kind >= kKinds) {
    return WrongRequest(request,
                        "there is no collective " + std::to_string(request.kind));
  }
  const KindTraits& traits = TraitsOf(static_cast<Kind>(request.kind));
  if (!traits.has_tensors) {
    if (request.count == 0) return Status::Ok();
    return WrongRequest(request, std::string("a ") + traits.name + " has no tensors");
  }
  if (request.count < 1 || request.tensors == nullptr) {
    return WrongRequest(request, "a request needs a tensor");
  }
  if (!traits.takes_group && request.count != 1) {
    return WrongRequest(
        request, std::string("one ") + traits.name + " takes one tensor, not several");
  }
  if (request.kind == KHVD_BROADCAST && (request.root < 0 || request.root >= size)) {
    return WrongRequest(request, "root_rank " + std::to_string(request.root) +
                                     " is not in 0.." + std::to_string(size - 1));
  }
  if (traits.has_own_rows && request.allocate == nullptr) {
    return WrongRequest(request, std::string(traits.name) + " needs `allocate`");
  }
  return Status::Ok();
}

Status CheckReduction(const khvd_request& request, const Membership& membership) {
  if (request.reduce_op < 0 || request.reduce_op >= kReduceOps) {
    return WrongRequest(request,
                        "there is no reduction " + std::to_string(request.reduce_op));
  }
  for (const double scale : {request.prescale, request.postscale}) {
    if (std::isnan(scale))
      return WrongRequest(request, "a scale is not a number (NaN)");
  }
  if (request.reduce_op != KHVD_ADASUM) return Status::Ok();
  if (request.kind != KHVD_ALLREDUCE) {
    return WrongRequest(request, std::string(Name(static_cast<Kind>(request.kind))) +
                                     " does not support Adasum");
  }
  if (membership.members > 0 && !CanAdasum(membership.members)) {
    return WrongRequest(request,
                        "Adasum takes a number of ranks that is a power of 2, not " +
                            std::to_string(membership.members));
  }
  return Status::Ok();
}

Status CheckType(const khvd_request& request, DataType dtype, bool empty,
                 const Reduction& reduction) {
  if (Supports(reduction, dtype)) return Status::Ok();
  const std::string name = Name(dtype);
  if (reduction.op == ReduceOp::kAdasum) {
    if (empty) return Status::Ok();
    return WrongRequest(request, "Adasum takes floating types, not " + name);
  }
  if (IsInteger(dtype)) {
    return WrongRequest(request, name + " tensors cannot be scaled by infinity");
  }
  if (!IsReduced(dtype)) {
    return WrongRequest(request, std::string(Name(reduction.op)) +
                                     " does not support " + name +
                                     " tensors: cast them");
  }
  return WrongRequest(request, std::string(Name(reduction.op)) +
                                   " and scales do not support " + name +
                                   " tensors: use Min (and), Max (or), or cast them");
}

Status CheckTensor(const khvd_request& request, const khvd_tensor& tensor,
                   const Reduction& reduction, const Membership& membership) {
  if (tensor.dtype < 0 || tensor.dtype >= kDataTypes) {
    return WrongRequest(request, "there is no type " + std::to_string(tensor.dtype));
  }
  if (tensor.rank < 0 || (tensor.rank > 0 && tensor.shape == nullptr)) {
    return WrongRequest(request, "a tensor needs a shape");
  }
  bool empty = false;
  bool countable = true;
  int64_t bytes = Bytes(static_cast<DataType>(tensor.dtype));
  for (int32_t i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] < 0) return WrongRequest(request, "a dimension is negative");
    empty |= tensor.shape[i] == 0;
    countable &= !__builtin_mul_overflow(bytes, tensor.shape[i], &bytes);
  }
  if (!countable && !empty) {
    return WrongRequest(request, "a tensor has more bytes than 64 bits can count");
  }
  const KindTraits& traits = TraitsOf(static_cast<Kind>(request.kind));
  if (tensor.rank == 0 && traits.moves_rows) {
    return WrongRequest(
        request,
        std::string(traits.name) + " is along the first dimension; a scalar has none");
  }
  // In a broadcast only the root must have an input. Some kinds allocate their output
  // later, and a reducescatter may give this rank no rows.
  const bool gets_none = traits.gives_parts && !traits.has_own_rows &&
                         ScatteredRows(membership, tensor.shape[0]) == 0;
  if (!empty && ((tensor.input == nullptr && request.kind != KHVD_BROADCAST) ||
                 (tensor.output == nullptr && !traits.has_own_rows && !gets_none))) {
    return WrongRequest(request, "a tensor has elements, but no data");
  }
  if (!traits.reduces) return Status::Ok();
  return CheckType(request, static_cast<DataType>(tensor.dtype), empty, reduction);
}

// Makes the splits of an alltoall of `rows` rows: how many go to each member.
Status MakeSplits(const khvd_request& request, int64_t rows, int members,
                  std::vector<int64_t>* made) {
  if (members == 0) return Status::Ok();
  if (request.splits == nullptr) {
    if (rows % members != 0) {
      return WrongRequest(request, "without splits the first dimension, " +
                                       std::to_string(rows) +
                                       ", must be a multiple of the number of ranks, " +
                                       std::to_string(members));
    }
    made->assign(members, rows / members);
    return Status::Ok();
  }
  if (request.split_count != members) {
    return WrongRequest(request, "splits must have one number for each rank, " +
                                     std::to_string(members) + ", and have " +
                                     std::to_string(request.split_count));
  }
  made->assign(request.splits, request.splits + members);
  int64_t left = rows;
  for (int64_t split : *made) {
    if (split < 0) {
      return WrongRequest(request, "a split is negative: " + std::to_string(split));
    }
    // Not their sum, which may overflow.
    if (split > left) return WrongSum(request, *made, rows);
    left -= split;
  }
  return left == 0 ? Status::Ok() : WrongSum(request, *made, rows);
}

Status ReductionOf(const khvd_request& request, const Membership& membership,
                   Reduction* reduction) {
  if (!Reduces(static_cast<Kind>(request.kind))) return Status::Ok();
  KHVD_RETURN_IF_ERROR(CheckReduction(request, membership));
  reduction->op = static_cast<ReduceOp>(request.reduce_op);
  if (request.prescale != 0 || request.postscale != 0) {
    reduction->prescale = request.prescale;
    reduction->postscale = request.postscale;
  }
  return Status::Ok();
}

int RootOf(const khvd_request& request) {
  return request.kind == KHVD_BROADCAST ? request.root : 0;
}

bool IsOnGpu(const khvd_request& request) {
  return request.on_gpu != 0 && TraitsOf(static_cast<Kind>(request.kind)).has_tensors;
}

// The first of a tensor's dimensions as the ranks compare it.
int64_t FirstDimension(const khvd_request& request, const khvd_tensor& tensor) {
  return HasOwnRows(static_cast<Kind>(request.kind)) ? -1 : tensor.shape[0];
}

bool IsOf(const khvd_request& request, const khvd_tensor& tensor,
          const TensorDescription& known) {
  const size_t rank = tensor.rank;
  if (known.dtype != static_cast<DataType>(tensor.dtype)) return false;
  if (known.shape.size() != rank) return false;
  if (rank == 0) return true;
  return known.shape[0] == FirstDimension(request, tensor) &&
         std::equal(known.shape.begin() + 1, known.shape.end(), tensor.shape + 1);
}

// Whether Describe would make an equal description.
bool IsOf(const khvd_request& request, const Reduction& reduction,
          const Description& known) {
  if (known.process_set != request.process_set || known.name != request.name ||
      known.kind != static_cast<Kind>(request.kind) ||
      !(known.reduction == reduction) || known.root != RootOf(request) ||
      known.on_gpu != IsOnGpu(request) ||
      known.labels != (request.labels != nullptr ? request.labels : "") ||
      known.tensors.size() != static_cast<size_t>(request.count)) {
    return false;
  }
  for (int32_t i = 0; i < request.count; ++i) {
    if (!IsOf(request, request.tensors[i], known.tensors[i])) return false;
  }
  return true;
}

std::shared_ptr<const Description> Describe(const khvd_request& request,
                                            const Reduction& reduction) {
  auto description = std::make_shared<Description>();
  description->process_set = request.process_set;
  description->name = request.name;
  description->kind = static_cast<Kind>(request.kind);
  description->reduction = reduction;
  description->root = RootOf(request);
  description->on_gpu = IsOnGpu(request);
  if (request.labels != nullptr) description->labels = request.labels;
  description->tensors.reserve(request.count);
  for (int32_t i = 0; i < request.count; ++i) {
    const khvd_tensor& tensor = request.tensors[i];
    std::vector<int64_t> shape(tensor.shape, tensor.shape + tensor.rank);
    if (!shape.empty()) shape[0] = FirstDimension(request, tensor);
    description->tensors.push_back(
        {static_cast<DataType>(tensor.dtype), std::move(shape)});
  }
  return description;
}

}  // namespace

bool DependsOnMembers(const khvd_request& request) {
  const bool is_kind = request.kind >= 0 && request.kind < kKinds;
  return request.reduce_op == KHVD_ADASUM ||
         (is_kind && TraitsOf(static_cast<Kind>(request.kind)).gives_parts);
}

Status MakeOperation(const khvd_request& request, int size,
                     const Membership& membership, KnownDescriptions* known,
                     std::unique_ptr<Operation>* made) {
  KHVD_RETURN_IF_ERROR(CheckRequest(request, size));
  Reduction reduction;
  KHVD_RETURN_IF_ERROR(ReductionOf(request, membership, &reduction));

  auto operation = std::make_unique<Operation>();
  operation->submitter = request.submitter;
  operation->buffers.reserve(request.count);
  for (int32_t i = 0; i < request.count; ++i) {
    const khvd_tensor& tensor = request.tensors[i];
    KHVD_RETURN_IF_ERROR(CheckTensor(request, tensor, reduction, membership));
    if (HasOwnRows(static_cast<Kind>(request.kind))) {
      operation->rows.push_back(tensor.shape[0]);
    }
    operation->buffers.push_back({tensor.input, tensor.output});
  }
  operation->description = known->Find(request.name);
  if (operation->description == nullptr ||
      !IsOf(request, reduction, *operation->description)) {
    operation->description = Describe(request, reduction);
    known->Add(operation->description);
  }
  if (request.kind == KHVD_ALLTOALL) {
    KHVD_RETURN_IF_ERROR(MakeSplits(request, operation->rows.front(),
                                    membership.members, &operation->splits));
  }
  if (request.allocate != nullptr) {
    operation->allocate = [allocate = request.allocate, context = request.context](
                              size_t tensor, const std::vector<int64_t>& rows) {
      return allocate(context, static_cast<int32_t>(tensor), rows.data(),
                      static_cast<int32_t>(rows.size()));
    };
  }
  *made = std::move(operation);
  return Status::Ok();
}

}  // namespace keras_hvd

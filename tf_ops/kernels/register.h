// Registers an op's kernel, of one class, for CPUs and GPUs.
#pragma once

#include "tensorflow/core/framework/op_kernel.h"

// A kernel for CPUs and GPUs. The further arguments name the tensors that stay in the
// host's memory: .HostMemory("splits").
#define KERAS_HVD_REGISTER(OP, KERNEL, ...)                                 \
  REGISTER_KERNEL_BUILDER(Name(OP).Device(tensorflow::DEVICE_CPU), KERNEL); \
  REGISTER_KERNEL_BUILDER(Name(OP).Device(tensorflow::DEVICE_GPU) __VA_ARGS__, KERNEL)

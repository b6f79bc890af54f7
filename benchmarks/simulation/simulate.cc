// Prints the time of a step's coordination as JSON: `simulate RANKS RANKS_PER_HOST HOP
// CONNECTION LOCAL CORES STEPS REQUESTS`, with times in microseconds. REQUESTS is the
// number of tensors of one float, or 0 for the gradients of ResNet-50.
#include <array>
#include <cstdio>
#include <cstdlib>

#include "benchmarks/simulation/coordination_simulation.h"

namespace keras_hvd {
namespace {

constexpr int kArguments = 8;

void PrintParts(const char* name, const std::array<double, kParts>& parts) {
  printf(", \"%s\": {", name);
  for (size_t part = 0; part < kParts; ++part) {
    printf("%s\"%s\": %.9f", part == 0 ? "" : ", ", Text(static_cast<Part>(part)),
           parts[part]);
  }
  printf("}");
}

std::vector<std::shared_ptr<const Description>> Alike(int count) {
  std::vector<std::shared_ptr<const Description>> requests;
  for (int i = 0; i < count; ++i) {
    Description description;
    description.name = "tensor " + std::to_string(i);
    description.tensors = {{DataType::kFloat32, {1}}};
    requests.push_back(std::make_shared<const Description>(std::move(description)));
  }
  return requests;
}

int Main(char** arguments) {
  SimulationOptions options;
  options.ranks = atoi(arguments[1]);
  options.ranks_per_host = atoi(arguments[2]);
  options.hop_seconds = atof(arguments[3]) * 1e-6;
  options.connection_seconds = atof(arguments[4]) * 1e-6;
  options.local_seconds = atof(arguments[5]) * 1e-6;
  options.cores = atoi(arguments[6]);
  options.steps = atoi(arguments[7]);
  const int requests = atoi(arguments[8]);
  const SimulationResult result =
      Simulate(options, requests == 0 ? ResNetGradients() : Alike(requests));
  printf("{\"hosts\": %d, \"messages\": %lld, \"decisions\": %lld, \"steps\": [",
         result.hosts, static_cast<long long>(result.messages),
         static_cast<long long>(result.decisions));
  for (size_t i = 0; i < result.steps.size(); ++i) {
    const SimulatedStep& step = result.steps[i];
    printf("%s{\"seconds\": %.9f", i == 0 ? "" : ", ", step.seconds);
    PrintParts("critical", step.critical);
    PrintParts("work", step.work);
    printf("}");
  }
  printf("]}\n");
  return 0;
}

}  // namespace
}  // namespace keras_hvd

int main(int count, char** arguments) {
  if (count != keras_hvd::kArguments + 1) {
    fprintf(stderr, "simulate: %d arguments are needed\n", keras_hvd::kArguments);
    return 2;
  }
  return keras_hvd::Main(arguments);
}

// For tests of the timeline: reads its file.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace keras_hvd {

inline std::string Path(const std::string& name) {
  return testing::TempDir() + "/" + std::to_string(getpid()) + "-" + name;
}

// ---- Reading: every event is a line

inline std::vector<std::string> Events(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> events;
  for (std::string line; std::getline(file, line);) {
    const size_t end = line.find_last_not_of(" ,");
    if (line.empty() || line.front() != '{') continue;
    EXPECT_EQ(line[end], '}') << line;
    events.push_back(line.substr(0, end + 1));
  }
  return events;
}

inline std::string Text(const std::string& event, const std::string& field) {
  const std::string key = "\"" + field + "\":\"";
  const size_t begin = event.find(key);
  if (begin == std::string::npos) return "";
  const size_t from = begin + key.size();
  return event.substr(from, event.find('"', from) - from);
}

inline double Number(const std::string& event, const std::string& field) {
  const size_t begin = event.find("\"" + field + "\":");
  if (begin == std::string::npos) return -1;
  return std::stod(event.substr(begin + field.size() + 3));
}

inline std::vector<std::string> Named(const std::vector<std::string>& events,
                                      const std::string& name) {
  std::vector<std::string> found;
  for (const std::string& event : events) {
    if (Text(event, "name") == name) found.push_back(event);
  }
  return found;
}

// The names of the spans in the row of a tensor.
inline std::multiset<std::string> Phases(const std::vector<std::string>& events,
                                         const std::string& tensor) {
  double row = -1;
  for (const std::string& event : Named(events, "thread_name")) {
    if (Text(event.substr(event.find("args")), "name") == tensor) {
      row = Number(event, "tid");
    }
  }
  std::multiset<std::string> phases;
  for (const std::string& event : events) {
    const bool is_span = Text(event, "ph") == "X";
    if (is_span && Number(event, "tid") == row) phases.insert(Text(event, "name"));
  }
  return phases;
}

// Spans of a row lie inside or behind each other.
inline void ExpectNested(const std::vector<std::string>& events) {
  std::map<double, std::vector<std::pair<double, double>>> rows;
  for (const std::string& event : events) {
    if (Text(event, "ph") != "X") continue;
    const double begin = Number(event, "ts");
    rows[Number(event, "tid")].emplace_back(begin, begin + Number(event, "dur"));
  }
  for (const auto& [row, spans] : rows) {
    for (const auto& [begin, end] : spans) {
      EXPECT_LE(begin, end);
      for (const auto& [other_begin, other_end] : spans) {
        // Written in thousandths of microseconds.
        const bool crosses = other_begin < begin - 1e-3 && begin + 1e-3 < other_end &&
                             other_end < end - 1e-3;
        EXPECT_FALSE(crosses) << "row " << row << ": " << begin << " to " << end;
      }
    }
  }
}

}  // namespace keras_hvd

// Environment variables for the length of a scope. MPI_Init reads them, and sets some of its own; children of this
// process must inherit neither: they would take themselves for a rank of this job.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace multicomm::bootstrap {

// Variables by which a launcher introduces a process to its PMIx or PMI server.
inline bool is_launcher_variable(std::string_view name) {
  if (name.starts_with("PMIX_MCA_") || name == "PMIX_PREFIX" || name == "PMIX_INSTALL_PREFIX") return false;
  return name.starts_with("PMIX_") || name.starts_with("PMI_") || name.starts_with("OMPI_COMM_WORLD_") ||
         name.starts_with("PRTE_") || name.starts_with("ORTE_");
}

// Whatever MPI, PMIx and their launchers may read or set.
inline bool is_mpi_variable(std::string_view name) {
  for (const char* prefix : {"PMIX_", "PMI_", "OMPI_", "OPAL_", "PRTE_", "ORTE_"})
    if (name.starts_with(prefix)) return true;
  return false;
}

// Names of the environment's variables that `matches` accepts.
inline std::vector<std::string> names_of(bool (*matches)(std::string_view)) {
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string_view name = text.substr(0, text.find('='));
    if (matches(name)) names.emplace_back(name);
  }
  return names;
}

// setenv() frees the array that other threads may be reading in getenv(), and programs do call that while MPI starts in
// the background (seen as a crash in getenv, once in fifty starts). So every change is a new array that takes the old
// one's place at once, and neither arrays nor entries are ever freed.
class ScopedEnvironment {
 public:
  ScopedEnvironment() {
    for (std::string& name : names_of(is_mpi_variable)) found_.insert(std::move(name));
  }
  ~ScopedEnvironment() {
    std::vector<char*> entries;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string name = name_in(*entry);
      if (before_.count(name) == 0 && (!is_mpi_variable(name) || found_.count(name) > 0)) entries.push_back(*entry);
    }
    for (const auto& [name, entry] : before_)
      if (entry != nullptr) entries.push_back(entry);
    publish(std::move(entries));
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

  void set(const std::string& name, const std::string& value) {
    std::vector<char*> entries = without([&](std::string_view other) { return other == name; });
    before_.try_emplace(name, nullptr);
    entries.push_back(strdup((name + "=" + value).c_str()));
    publish(std::move(entries));
  }
  void set_default(const std::string& name, const std::string& value) {
    if (std::getenv(name.c_str()) == nullptr) set(name, value);
  }
  // Hides every variable whose name `matches`.
  void hide(bool (*matches)(std::string_view)) { publish(without(matches)); }

 private:
  static std::string name_in(const char* entry) { return {entry, strcspn(entry, "=")}; }
  // The entries but those whose name `matches`, which are remembered.
  template <typename Matches>
  std::vector<char*> without(Matches matches) {
    std::vector<char*> entries;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string name = name_in(*entry);
      if (matches(name)) before_.try_emplace(name, *entry);
      else entries.push_back(*entry);
    }
    return entries;
  }
  static void publish(std::vector<char*> entries) {
    static auto* const kept = new std::list<std::vector<char*>>();
    entries.push_back(nullptr);
    kept->push_back(std::move(entries));
    std::atomic_ref(environ).store(kept->back().data(), std::memory_order_release);
  }

  std::set<std::string> found_;
  std::map<std::string, char*> before_;  // entries that were changed or hidden; null: there was none
};

}  // namespace multicomm::bootstrap

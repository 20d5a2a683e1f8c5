// Environment variables for the length of a scope. MPI_Init reads them, and sets some of its own; children of this
// process must inherit neither: they would take themselves for a rank of this job.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <map>
#include <optional>
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

class ScopedEnvironment {
 public:
  ScopedEnvironment() {
    for (std::string& name : names_of(is_mpi_variable)) found_.insert(std::move(name));
  }
  ~ScopedEnvironment() {
    for (const std::string& name : names_of(is_mpi_variable)) {
      if (found_.count(name) == 0) unsetenv(name.c_str());
    }
    for (const auto& [name, value] : before_) {
      if (value) setenv(name.c_str(), value->c_str(), 1);
      else unsetenv(name.c_str());
    }
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

  void set(const std::string& name, const std::string& value) {
    remember(name);
    setenv(name.c_str(), value.c_str(), 1);
  }
  void set_default(const std::string& name, const std::string& value) {
    if (std::getenv(name.c_str()) == nullptr) set(name, value);
  }
  // Hides every variable whose name `matches`.
  void hide(bool (*matches)(std::string_view)) {
    for (const std::string& name : names_of(matches)) {
      remember(name);
      unsetenv(name.c_str());
    }
  }

 private:
  void remember(const std::string& name) {
    const char* value = std::getenv(name.c_str());
    before_.try_emplace(name, value == nullptr ? std::nullopt : std::optional<std::string>(value));
  }
  std::set<std::string> found_;
  std::map<std::string, std::optional<std::string>> before_;
};

}  // namespace multicomm::bootstrap

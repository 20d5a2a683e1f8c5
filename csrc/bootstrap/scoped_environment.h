// Environment variables for the length of a scope. MPI_Init reads them; children of this process must not inherit them.
#pragma once

#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

extern char** environ;

namespace multicomm::bootstrap {

class ScopedEnvironment {
 public:
  ScopedEnvironment() = default;
  ~ScopedEnvironment() {
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
  void hide(const std::function<bool(std::string_view)>& matches) {
    std::vector<std::string> names;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string_view text(*entry);
      const std::string_view name = text.substr(0, text.find('='));
      if (matches(name)) names.emplace_back(name);
    }
    for (const std::string& name : names) {
      remember(name);
      unsetenv(name.c_str());
    }
  }

 private:
  void remember(const std::string& name) {
    const char* value = std::getenv(name.c_str());
    before_.try_emplace(name, value == nullptr ? std::nullopt : std::optional<std::string>(value));
  }
  std::map<std::string, std::optional<std::string>> before_;
};

// Variables by which a launcher introduces a process to its PMIx or PMI server.
inline bool is_launcher_variable(std::string_view name) {
  if (name.starts_with("PMIX_MCA_") || name == "PMIX_PREFIX" || name == "PMIX_INSTALL_PREFIX") return false;
  return name.starts_with("PMIX_") || name.starts_with("PMI_") || name.starts_with("OMPI_COMM_WORLD_") ||
         name.starts_with("PRTE_") || name.starts_with("ORTE_");
}

}  // namespace multicomm::bootstrap

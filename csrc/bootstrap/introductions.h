// What the ranks tell each other at start, and what follows from it: who is on which node.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "bootstrap/node_config.h"

namespace multicomm::bootstrap {

// This process's text for the others: its id, a proposal for the job's name, its host's identity.
std::string introduction();

// The job from every rank's introduction, as `rank` sees it; but for the library's path, which only its process knows.
// Throws std::runtime_error, the same on every rank, that names the rank whose text is no introduction.
NodeConfig arrange_nodes(const std::vector<std::string>& introductions, int rank);

// Variables for MPI from the server's block of NAME=VALUE entries, each with a NUL behind it. Throws
// std::runtime_error for a variable that is none of MPI's: the block comes from a store that others can write.
std::map<std::string, std::string> read_environment(const std::string& block);

}  // namespace multicomm::bootstrap

#include "transport/mpi/inquiries.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace multicomm::mpi {
namespace {

constexpr int kInquiryTag = 1;
constexpr int kAnswerTag = 2;
constexpr int kReportInquiryTag = 3;
constexpr int kReportTag = 4;
constexpr int kNoticeTag = 5;

// Takes a matched message whole. Small enough to have come with its announcement: receiving it waits for nobody.
template <typename Message>
bool take(MPI_Message& message, Message& into) {
  return MPI_Mrecv(&into, sizeof(into), MPI_BYTE, &message, MPI_STATUS_IGNORE) == MPI_SUCCESS;
}

}  // namespace

void Inquiries::send(const void* data, size_t bytes, int tag, int to) {
  Sending& sending = sending_.emplace_back();
  sending.owner = this;
  sending.self = std::prev(sending_.end());
  const auto* begin = static_cast<const std::byte*>(data);
  sending.data.assign(begin, begin + bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Isend(sending.data.data(), static_cast<int>(bytes), MPI_BYTE, to, tag, communicator_, &request) ==
      MPI_SUCCESS) {
    requests_.add(request, sending);
  } else {
    sending_.erase(sending.self);  // it cannot be reached, and will be said not to answer
  }
}

void Inquiries::ask(int global_rank, const Inquiry& inquiry) {
  send(&inquiry, sizeof(inquiry), kInquiryTag, global_rank);
}

void Inquiries::tell(int global_rank, const Notice& notice) { send(&notice, sizeof(notice), kNoticeTag, global_rank); }

void Inquiries::ask_report(int global_rank, const ReportInquiry& inquiry) {
  send(&inquiry, sizeof(inquiry), kReportInquiryTag, global_rank);
}

void Inquiries::send_report(int global_rank, uint64_t number, const std::string& report) {
  Piece piece{number, 0, 0, 0, {}};
  piece.pieces = static_cast<uint32_t>((report.size() + sizeof(piece.text) - 1) / sizeof(piece.text));
  for (; piece.index < piece.pieces; ++piece.index) {
    piece.bytes = static_cast<uint32_t>(report.copy(piece.text, sizeof(piece.text), piece.index * sizeof(piece.text)));
    send(&piece, offsetof(Piece, text) + piece.bytes, kReportTag, global_rank);
  }
}

void Inquiries::receive_piece(MPI_Message message, int from) {
  Receiving& receiving = receiving_.emplace_back();
  receiving.owner = this;
  receiving.from = from;
  receiving.self = std::prev(receiving_.end());
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Imrecv(&receiving.piece, sizeof(Piece), MPI_BYTE, &message, &request) == MPI_SUCCESS) {
    requests_.add(request, receiving);
  } else {
    receiving_.erase(receiving.self);
  }
}

void Inquiries::received(Receiving& receiving, bool whole) {
  const int from = receiving.from;
  const Piece piece = receiving.piece;
  receiving_.erase(receiving.self);  // `receiving` is gone from here on
  if (!whole || piece.bytes > sizeof(piece.text) || piece.index >= piece.pieces) return;
  Assembly& assembly = assemblies_[from];
  if (assembly.number != piece.number) assembly = {piece.number, {}};
  assembly.pieces[piece.index].assign(piece.text, piece.bytes);
  if (assembly.pieces.size() < piece.pieces) return;
  std::string report;
  for (const auto& [index, text] : assembly.pieces) report += text;
  assemblies_.erase(from);
  sink_.report_came(from, piece.number, report);
}

void Inquiries::look() {
  while (true) {
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    if (MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, communicator_, &found, &message, &status) != MPI_SUCCESS || found == 0)
      return;
    const int from = status.MPI_SOURCE;
    Inquiry inquiry{};
    Answer answer{};
    Notice notice{};
    ReportInquiry report_inquiry{};
    switch (status.MPI_TAG) {
      case kInquiryTag:
        if (!take(message, inquiry)) return;
        answer = sink_.answer(inquiry);
        send(&answer, sizeof(answer), kAnswerTag, from);
        break;
      case kAnswerTag:
        if (!take(message, answer)) return;
        sink_.answered(from, answer);
        break;
      case kNoticeTag:
        if (!take(message, notice)) return;
        sink_.told(notice);
        break;
      case kReportInquiryTag:
        if (!take(message, report_inquiry)) return;
        sink_.report_asked(from, report_inquiry);
        break;
      default: receive_piece(message, from);
    }
  }
}

}  // namespace multicomm::mpi

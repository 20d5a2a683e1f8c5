#include "transport/mpi/inquiries.h"

namespace multicomm::mpi {
namespace {

constexpr int kInquiryTag = 1;
constexpr int kAnswerTag = 2;

}  // namespace

Inquiries::Sending& Inquiries::new_sending() {
  Sending& sending = sending_.emplace_back();
  sending.owner = this;
  sending.self = std::prev(sending_.end());
  return sending;
}

void Inquiries::send(Sending& sending, const void* data, size_t bytes, int tag, int to) {
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, tag, world_, &request) == MPI_SUCCESS) {
    requests_.add(request, sending);
  } else {
    sending_.erase(sending.self);  // it cannot be reached, and will be said not to answer
  }
}

void Inquiries::ask(int global_rank, const Inquiry& inquiry) {
  Sending& sending = new_sending();
  sending.inquiry = inquiry;
  send(sending, &sending.inquiry, sizeof(Inquiry), kInquiryTag, global_rank);
}

void Inquiries::look() {
  while (true) {
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    if (MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, world_, &found, &message, &status) != MPI_SUCCESS || found == 0)
      return;
    // Small enough to have come whole with its announcement: receiving them waits for nobody.
    if (status.MPI_TAG == kInquiryTag) {
      Inquiry inquiry{};
      if (MPI_Mrecv(&inquiry, sizeof(inquiry), MPI_BYTE, &message, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
      Sending& sending = new_sending();
      sending.answer = sink_.answer(inquiry);
      send(sending, &sending.answer, sizeof(Answer), kAnswerTag, status.MPI_SOURCE);
    } else {
      Answer answer{};
      if (MPI_Mrecv(&answer, sizeof(answer), MPI_BYTE, &message, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
      sink_.answered(status.MPI_SOURCE, answer);
    }
  }
}

}  // namespace multicomm::mpi

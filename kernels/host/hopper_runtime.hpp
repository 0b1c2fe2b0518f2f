// Hopper on the host: the functions behind hopper.hpp, with and without checks.
//
// What is asynchronous happens as late as the rules allow. Writes by ordinary stores are visible to
// TMA and to products only after a tma_fence by the thread that wrote them.
#pragma once

#include "hopper_barriers.hpp"
#include "hopper_copies.hpp"
#include "hopper_products.hpp"
#include "hopper_turns.hpp"

namespace host {

template <bool CHECKS>
constexpr HopperRuntime HOPPER = {
    mbarrier_init,         mbarrier_init_done, mbarrier_arrive,   mbarrier_wait,
    tma_load<CHECKS>,      tma_store<CHECKS>,  bulk_load<CHECKS>, bulk_add<CHECKS>,
    add_global_x4<CHECKS>, bulk_commit,        bulk_wait<CHECKS>, turn_wait<CHECKS>,
    turn_pass<CHECKS>,     tma_fence,          named_barrier,     set_registers,
    wgmma<CHECKS>,         wgmma_commit,       wgmma_wait<CHECKS>, stmatrix_x4<CHECKS>,
};

}  // namespace host

//! What every implementation of [`Store`] must do, as tests that any of them can run.
//!
//! An implementation gives a [`Backend`] and calls [`conformance_tests!`](crate::conformance_tests) in its test
//! module:
//!
//! ```text
//! conformance_tests!(MyBackend::new());
//! ```

#![expect(clippy::unwrap_used, reason = "a failed conformance test is a panic")]

mod conversations;
mod events;
mod fixture;
mod random;
mod runners;
mod summaries;
mod turns;

use crate::store::Store;

pub use conversations::*;
pub use events::*;
pub use random::*;
pub use runners::*;
pub use summaries::*;
pub use turns::*;

/// Something that can open a store, and open it again after it was closed.
pub trait Backend: Send + Sync + 'static {
    /// The implementation.
    type Store: Store;

    /// Opens the store of this backend; the same data every time.
    fn open(&self) -> impl Future<Output = Self::Store> + Send;
}

/// Makes one test of each case of the suite.
#[macro_export]
macro_rules! conformance_tests {
    ($backend:expr) => {
        $crate::conformance_tests!(@cases $backend;
            s02_a_repeated_request_returns_the_first_message_in_every_state,
            s02_twenty_callers_with_one_request_id_make_one_turn,
            s02_another_body_under_the_same_request_id_is_refused,
            s03_seq_is_contiguous_by_arrival_and_position_by_promotion,
            a_full_queue_refuses_the_next_message,
            bad_messages_are_refused_and_leave_nothing,
            create_is_get_or_create,
            a_conversation_has_a_first_agent_and_workspace,
            sending_unarchives,
            conversations_are_listed_newest_first_in_pages,
            attention_has_its_facts,
            everything_survives_closing_and_opening,
            s06_the_next_turn_is_promoted_after_every_end,
            s06_a_cancelled_waiting_turn_lets_the_next_one_through,
            s04_the_next_turn_sees_what_the_one_before_saved,
            s07_an_ended_turn_absorbs,
            s07_a_cancelled_turn_ends_cancelled_or_lost,
            s44_cancel_twice_after_the_end_and_for_an_unknown_turn,
            s48_a_stale_epoch_changes_nothing,
            s48_a_lost_turn_moves_the_epoch_and_keeps_its_slot,
            an_arrangement_is_all_or_nothing,
            retry_keeps_message_position_and_agent,
            retry_is_refused_once_a_later_turn_started,
            s09_the_first_agent_snapshot_stands,
            usage_is_summed_over_turns,
            turns_are_listed_oldest_first_in_pages,
            s29_events_are_stored_once_and_numbered_without_gap,
            a_gap_in_the_runners_numbers_is_refused,
            batches_have_limits,
            accepted_moves_the_watermark_and_the_end_moves_it_again,
            s13_the_native_ref_is_kept_when_the_turn_fails,
            s16_unusable_is_for_ever,
            s16_marking_unusable_is_repeatable_and_told,
            what_was_given_beside_a_message_is_not_given_again,
            s63_of_two_writers_of_a_summary_one_wins,
            s63_a_turn_is_told_of_the_summary_that_it_was_promoted_with,
            a_summary_is_checked_and_every_version_is_kept,
            s61_a_replacement_is_bound_and_said_so,
            s10_sessions_are_not_shared,
            permissions_move_the_turn_and_the_first_answer_stands,
            the_end_settles_open_permissions,
            followers_read_every_change_in_order,
            cursors_that_are_pruned_or_unknown_are_told_apart,
            hints_follow_commits,
            diagnosis_is_bounded_and_changes_nothing,
            slots_hold_parents_and_children_and_go_by_promotion,
            free_workspace_needs_the_right_turn_and_its_end,
            runners_register_beat_and_drain,
            a_runners_claims_raise_epochs,
            ended_turns_wait_for_acknowledgement,
            the_control_plane_id_is_made_once,
            random_intents_keep_the_invariants,
        );
    };
    (@cases $backend:expr; $($case:ident,)+) => {
        $(
            #[tokio::test]
            async fn $case() {
                let backend = $backend;
                $crate::conformance::$case(&backend).await;
            }
        )+
    };
}

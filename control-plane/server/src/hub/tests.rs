//! Unfinished text: merged, never lost; nothing kept for what is over.

use super::*;

fn conversation() -> ConversationId {
    ConversationId::parse("cnv_1").unwrap()
}

fn turn() -> TurnId {
    TurnId::parse("trn_1").unwrap()
}

fn partial(offset: u64, text: &str) -> Partial {
    Partial { item_id: "i".into(), offset, text: text.into(), reasoning: false, truncated: false }
}

fn texts(pieces: &[Piece]) -> Vec<(u64, &str)> {
    pieces
        .iter()
        .map(|piece| match piece {
            Piece::Partial(_, p) => (p.offset, p.text.as_str()),
            Piece::Reset(..) => (u64::MAX, "reset"),
        })
        .collect()
}

#[test]
fn a_late_subscriber_gets_the_whole_and_then_only_what_is_new() {
    let hub = Arc::new(Hub::default());
    let mut early = hub.subscribe(&conversation());
    hub.partial(&conversation(), &turn(), &partial(0, "one "));
    assert_eq!(texts(&early.pieces(None)), [(0, "one ")]);
    hub.partial(&conversation(), &turn(), &partial(4, "two "));
    let mut late = hub.subscribe(&conversation());
    assert_eq!(texts(&late.pieces(None)), [(0, "one two ")]);
    assert_eq!(texts(&early.pieces(None)), [(4, "two ")]);
    assert!(early.pieces(None).is_empty());
}

#[test]
fn pieces_that_are_known_or_leave_a_gap_change_nothing() {
    let hub = Arc::new(Hub::default());
    let mut sub = hub.subscribe(&conversation());
    hub.partial(&conversation(), &turn(), &partial(0, "abc"));
    hub.partial(&conversation(), &turn(), &partial(1, "bc"));
    hub.partial(&conversation(), &turn(), &partial(9, "z"));
    hub.partial(&conversation(), &turn(), &partial(2, "cd"));
    assert_eq!(texts(&sub.pieces(None)), [(0, "abcd")]);
}

#[test]
fn what_a_slow_subscriber_missed_is_merged_not_dropped() {
    let hub = Arc::new(Hub::default());
    let mut sub = hub.subscribe(&conversation());
    for n in 0..1_000 {
        hub.partial(&conversation(), &turn(), &partial(n, "x"));
    }
    let pieces = sub.pieces(None);
    assert_eq!(pieces.len(), 1);
    assert_eq!(texts(&pieces)[0].1.len(), 1_000);
}

#[test]
fn a_reset_is_told_to_those_who_had_something() {
    let hub = Arc::new(Hub::default());
    let mut sub = hub.subscribe(&conversation());
    hub.partial(&conversation(), &turn(), &partial(0, "wrong"));
    assert_eq!(texts(&sub.pieces(None)), [(0, "wrong")]);
    hub.reset(&conversation(), &turn(), "i");
    hub.partial(&conversation(), &turn(), &partial(0, "right"));
    assert_eq!(texts(&sub.pieces(None)), [(u64::MAX, "reset"), (0, "right")]);
    let mut late = hub.subscribe(&conversation());
    assert_eq!(texts(&late.pieces(None)), [(0, "right")]);
}

#[test]
fn a_snapshot_with_another_text_takes_the_place_of_what_was_known() {
    let hub = Arc::new(Hub::default());
    let mut sub = hub.subscribe(&conversation());
    hub.partial(&conversation(), &turn(), &partial(0, "wrong"));
    assert_eq!(texts(&sub.pieces(None)), [(0, "wrong")]);
    // The runner's stream broke; meanwhile the engine began the item anew.
    hub.partial(&conversation(), &turn(), &partial(0, "right, and longer"));
    assert_eq!(texts(&sub.pieces(None)), [(u64::MAX, "reset"), (0, "right, and longer")]);
    // A snapshot of what is known already, or less of it, changes nothing.
    hub.partial(&conversation(), &turn(), &partial(0, "right"));
    assert!(sub.pieces(None).is_empty());
}

#[test]
fn an_item_that_begins_again_under_the_id_of_a_finished_one_is_given_from_its_beginning() {
    let hub = Arc::new(Hub::default());
    let mut sub = hub.subscribe(&conversation());
    hub.partial(&conversation(), &turn(), &partial(0, "first"));
    assert_eq!(texts(&sub.pieces(None)), [(0, "first")]);
    hub.finish(&conversation(), &turn(), "i");
    hub.partial(&conversation(), &turn(), &partial(0, "second"));
    assert_eq!(texts(&sub.pieces(None)), [(u64::MAX, "reset"), (0, "second")]);
}

#[test]
fn s32_an_item_beyond_the_limit_is_cut_on_a_character_and_flagged() {
    let hub = Arc::new(Hub::default());
    let mut sub = hub.subscribe(&conversation());
    hub.partial(&conversation(), &turn(), &partial(0, &"x".repeat(MAX_ITEM_BYTES - 1)));
    hub.partial(&conversation(), &turn(), &partial((MAX_ITEM_BYTES - 1) as u64, "äb"));
    hub.partial(&conversation(), &turn(), &partial((MAX_ITEM_BYTES + 2) as u64, "c"));
    let pieces = sub.pieces(None);
    let Piece::Partial(_, whole) = &pieces[0] else { panic!("a partial") };
    assert_eq!((whole.text.len(), whole.truncated), (MAX_ITEM_BYTES - 1, true));
}

#[test]
fn nothing_is_kept_for_conversations_that_are_over() {
    let hub = Arc::new(Hub::default());
    let sub = hub.subscribe(&conversation());
    hub.partial(&conversation(), &turn(), &partial(0, "x"));
    drop(sub);
    hub.end(&conversation(), &turn());
    assert!(hub.topics().is_empty());
    drop(hub.subscribe(&conversation()));
    assert!(hub.topics().is_empty());
}

#[tokio::test]
async fn a_change_between_marking_and_waiting_is_not_missed() {
    let hub = Arc::new(Hub::default());
    let mut sub = hub.subscribe(&conversation());
    sub.mark_seen();
    hub.stored(&conversation());
    sub.changed().await;
}

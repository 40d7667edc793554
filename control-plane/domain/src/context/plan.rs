//! Which messages go in, and how much of each.

use super::render::{AFTER_TEXT, Frame, chars, cut_middle};
use super::{Composed, ContextError, HistoryMessage, MIN_BUDGET_CHARS, Omitted, Purpose, Request, Summary};

/// The opening gets one part in this many of the room.
const ANCHOR_SHARE: usize = 4;
/// A message is not cut to less than this many characters, heading and marker included: a few words without
/// their context mislead more than a marker that says that the message is missing.
const MIN_CUT_CHARS: usize = 400;

/// A message with its heading and what it costs when whole.
struct Entry<'a> {
    message: &'a HistoryMessage<'a>,
    heading: String,
    cost: usize,
}

/// A message that goes in: its text, and whether that was cut.
struct Chosen<'e, 'a> {
    entry: &'e Entry<'a>,
    text: String,
    cut: bool,
}

impl Chosen<'_, '_> {
    fn cost(&self) -> usize {
        chars(&self.entry.heading) + chars(&self.text) + chars(AFTER_TEXT)
    }
}

/// See [`super::compose`].
pub(super) fn compose(request: &Request<'_>) -> Result<Option<Composed>, ContextError> {
    check_budget(request)?;
    let (agent_prompt, summary, after) = match request.purpose {
        Purpose::Seed { agent_prompt, summary } => (agent_prompt, summary, summary.map(|s| s.through)),
        Purpose::CatchUp { after } => (None, None, Some(after)),
    };
    let history = relevant(request, after)?;
    if history.is_empty() && agent_prompt.is_none() && summary.is_none() {
        return Ok(None);
    }

    let frame = Frame::new(request);
    let mut text = String::new();
    if let Some(prompt) = agent_prompt {
        text.push_str(&frame.agent_prompt(prompt));
    }
    let mut composed = Composed {
        text: String::new(),
        code: frame.code().to_owned(),
        summary: summary.is_some(),
        given: Vec::new(),
        cut: Vec::new(),
        omitted: None,
    };
    if !history.is_empty() || summary.is_some() {
        let closing = frame.closing();
        text.push_str(&frame.preamble(&request.purpose));
        let mut room = request.budget.saturating_sub(chars(&text) + chars(&closing));
        if let Some(summary) = summary {
            let block = summary_block(&frame, &summary, room, history.is_empty());
            room = room.saturating_sub(chars(&block));
            text.push_str(&block);
        }
        write_history(&frame, &history, room, &mut text, &mut composed);
        text.push_str(&closing);
    }
    composed.text = text;
    Ok(Some(composed))
}

fn check_budget(request: &Request<'_>) -> Result<(), ContextError> {
    let prompt = match request.purpose {
        Purpose::Seed { agent_prompt: Some(prompt), .. } => chars(prompt),
        Purpose::Seed { agent_prompt: None, .. } | Purpose::CatchUp { .. } => 0,
    };
    let needed = prompt.saturating_add(MIN_BUDGET_CHARS);
    if request.budget < needed {
        return Err(ContextError::BudgetTooSmall { budget: request.budget, needed });
    }
    Ok(())
}

/// The messages to tell of, in order of position.
fn relevant<'a>(
    request: &Request<'a>,
    after: Option<u64>,
) -> Result<Vec<&'a HistoryMessage<'a>>, ContextError> {
    let mut history: Vec<_> = request
        .history
        .iter()
        .filter(|m| Some(m.position) != request.own_position)
        .filter(|m| after.is_none_or(|after| m.position > after))
        .collect();
    history.sort_by_key(|m| m.position);
    for pair in history.windows(2) {
        if let [a, b] = pair
            && a.position == b.position
        {
            return Err(ContextError::DuplicatePosition { position: a.position });
        }
    }
    Ok(history)
}

/// The summary, in at most half of the room when messages follow it.
fn summary_block(frame: &Frame, summary: &Summary<'_>, room: usize, alone: bool) -> String {
    let heading = frame.summary_heading(summary.through);
    let share = if alone { room } else { room / 2 };
    let room = share.saturating_sub(chars(&heading) + chars(AFTER_TEXT));
    // The smallest budget leaves more room than a marker needs, so there is always a cut text.
    let text = cut_middle(frame, summary.text, room).unwrap_or_default();
    [heading.as_str(), &text, AFTER_TEXT].concat()
}

fn write_history(
    frame: &Frame,
    history: &[&HistoryMessage<'_>],
    room: usize,
    text: &mut String,
    composed: &mut Composed,
) {
    let entries: Vec<Entry<'_>> = history
        .iter()
        .map(|&message| {
            let heading = frame.heading(message);
            let cost = chars(&heading) + chars(message.text) + chars(AFTER_TEXT);
            Entry { message, heading, cost }
        })
        .collect();
    let (opening, newest) = choose(frame, &entries, room);
    let omitted = entries.get(opening.len()..entries.len() - newest.len()).unwrap_or(&[]);
    if let (Some(first), Some(last)) = (omitted.first(), omitted.last()) {
        composed.omitted = Some(Omitted {
            count: omitted.len(),
            first: first.message.position,
            last: last.message.position,
        });
    }
    let mut write = |chosen: &[Chosen<'_, '_>], text: &mut String| {
        for one in chosen {
            text.push_str(&one.entry.heading);
            text.push_str(&one.text);
            text.push_str(AFTER_TEXT);
            composed.given.push(one.entry.message.position);
            if one.cut {
                composed.cut.push(one.entry.message.position);
            }
        }
    };
    write(&opening, text);
    if let Some(omitted) = &composed.omitted {
        text.push_str(&frame.omission(omitted));
    }
    write(&newest, text);
}

/// The opening and the newest messages, each in order. Together they are everything, or what is between
/// them is left out.
fn choose<'e, 'a>(
    frame: &Frame,
    entries: &'e [Entry<'a>],
    room: usize,
) -> (Vec<Chosen<'e, 'a>>, Vec<Chosen<'e, 'a>>) {
    let whole = |entry: &'e Entry<'a>| Chosen { entry, text: entry.message.text.to_owned(), cut: false };
    let total = entries.iter().fold(0usize, |sum, entry| sum.saturating_add(entry.cost));
    if total <= room {
        return (entries.iter().map(whole).collect(), Vec::new());
    }
    let (Some(first), Some((last, older))) = (entries.first(), entries.split_last()) else {
        return (Vec::new(), Vec::new());
    };
    // Reserve the longest that the marker for left-out messages can be.
    let widest =
        Omitted { count: entries.len().max(2), first: last.message.position, last: last.message.position };
    let room = room.saturating_sub(chars(&frame.omission(&widest)));
    let anchor_room = room / ANCHOR_SHARE;

    // The newest message comes first: it stays whole unless it alone is larger than the room. Only then does
    // it make way for the opening.
    let last_room = if last.cost <= room { last.cost } else { room - anchor_room };
    let mut left = room - last_room.min(room);

    let mut opening: Vec<Chosen<'e, 'a>> = Vec::new();
    let mut anchor_left = anchor_room.min(left);
    for entry in older {
        if entry.cost > anchor_left {
            break;
        }
        anchor_left -= entry.cost;
        left -= entry.cost;
        opening.push(whole(entry));
    }
    // An opening that is larger than its whole share is cut; one that only has to make way for a large
    // newest message is left out.
    if opening.is_empty()
        && !older.is_empty()
        && first.cost > anchor_room
        && let Some(chosen) = cut_to(frame, first, anchor_left)
    {
        left = left.saturating_sub(chosen.cost());
        opening.push(chosen);
    }

    // What the opening did not need is for the newest.
    let mut newest: Vec<Chosen<'e, 'a>> = Vec::new();
    let last_room = if last.cost <= room { last_room } else { last_room + left };
    match cut_to(frame, last, last_room) {
        Some(chosen) if chosen.cut => {
            newest.push(chosen);
            return (opening, newest);
        }
        Some(chosen) => newest.push(chosen),
        None => return (opening, newest),
    }
    for entry in older.iter().skip(opening.len()).rev() {
        if entry.cost <= left {
            left -= entry.cost;
            newest.push(whole(entry));
            continue;
        }
        // A message that no budget could hold is cut rather than left out for good.
        if entry.cost > room
            && let Some(chosen) = cut_to(frame, entry, left)
        {
            newest.push(chosen);
        }
        break;
    }
    newest.reverse();
    (opening, newest)
}

/// A message within `room` characters, heading included: whole, cut, or none when too little would be left.
fn cut_to<'e, 'a>(frame: &Frame, entry: &'e Entry<'a>, room: usize) -> Option<Chosen<'e, 'a>> {
    if entry.cost <= room {
        return Some(Chosen { entry, text: entry.message.text.to_owned(), cut: false });
    }
    if room < MIN_CUT_CHARS {
        return None;
    }
    let text_room = room.checked_sub(chars(&entry.heading) + chars(AFTER_TEXT))?;
    let text = cut_middle(frame, entry.message.text, text_room)?;
    Some(Chosen { entry, text, cut: true })
}

//! The texts in progress: what makes partial text, and what ties it to the final item.
//!
//! An item is named by the engine's id. A text that the engine throws away (a broken stream, a message that came in
//! between) is simply never finished; its partial text is then taken back.

use std::collections::HashSet;

use crate::{
    event::ItemKey,
    limit,
    translate::{Output, Partial},
};

#[derive(Debug)]
struct Open {
    id: String,
    key: ItemKey,
    reasoning: bool,
    /// The text so far, at most [`limit::ANSWER_LIMIT`] bytes.
    text: String,
    /// How many bytes there were in all.
    length: u64,
    /// Which part of a reasoning the text is in.
    part: u64,
}

/// A text that will get no final item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unfinished {
    pub(super) key: ItemKey,
    pub(super) reasoning: bool,
    pub(super) text: String,
}

/// Every text in progress.
#[derive(Debug, Default)]
pub(super) struct Items {
    open: Vec<Open>,
    /// Names that were used. None is used again.
    used: HashSet<ItemKey>,
}

impl Items {
    /// A name for an item: the engine's, or with a number behind it if that was used.
    fn name(&mut self, id: &str) -> ItemKey {
        let id = match id {
            "" => "item",
            id => limit::prefix(id, 200),
        };
        let mut key = ItemKey(id.to_owned());
        let mut number = 2;
        while !self.used.insert(key.clone()) {
            key = ItemKey(format!("{id}.{number}"));
            number += 1;
        }
        key
    }

    fn place(&mut self, id: &str, reasoning: bool) -> usize {
        match self.open.iter().position(|open| open.id == id && open.reasoning == reasoning) {
            Some(place) => place,
            None => {
                let key = self.name(id);
                let id = id.to_owned();
                self.open.push(Open { id, key, reasoning, text: String::new(), length: 0, part: 0 });
                self.open.len() - 1
            }
        }
    }

    /// Text arrives. A new part of a reasoning is set off by an empty line.
    pub(super) fn append(&mut self, id: &str, reasoning: bool, part: u64, text: &str) -> Partial {
        let place = self.place(id, reasoning);
        let open = &mut self.open[place];
        let mut piece = String::new();
        if part > open.part {
            open.part = part;
            if open.length > 0 {
                piece.push_str("\n\n");
            }
        }
        piece.push_str(text);
        let offset = open.length;
        open.length += piece.len() as u64;
        let room = limit::ANSWER_LIMIT - open.text.len();
        open.text.push_str(limit::prefix(&piece, room));
        Partial { item: open.key.clone(), reasoning, offset, text: piece, parent_call: None }
    }

    /// The final item has come: its name.
    pub(super) fn finish(&mut self, id: &str, reasoning: bool) -> ItemKey {
        let place = self.place(id, reasoning);
        self.open.remove(place).key
    }

    /// The engine threw away whatever is unfinished.
    pub(super) fn abandon(&mut self, out: &mut Vec<Output>) {
        for open in std::mem::take(&mut self.open) {
            if open.length > 0 {
                out.push(Output::PartialReset { item: open.key });
            }
        }
    }

    /// Takes out every text that will get no final item.
    pub(super) fn drain(&mut self) -> Vec<Unfinished> {
        std::mem::take(&mut self.open)
            .into_iter()
            .filter(|open| !open.text.is_empty())
            .map(|open| Unfinished { key: open.key, reasoning: open.reasoning, text: open.text })
            .collect()
    }

    /// Every unfinished text from its beginning.
    pub(super) fn snapshot(&self) -> Vec<Partial> {
        self.open
            .iter()
            .filter(|open| !open.text.is_empty())
            .map(|open| Partial {
                item: open.key.clone(),
                reasoning: open.reasoning,
                offset: 0,
                text: open.text.clone(),
                parent_call: None,
            })
            .collect()
    }
}

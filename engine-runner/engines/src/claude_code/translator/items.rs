//! The content blocks of the messages in progress: what makes partial text, and what ties it to the final line.
//!
//! A message streams block by block; the finished block comes once more as an assistant line, after its text and
//! before its stop. Blocks are named by message and index, so that the line replaces the partial text. When a
//! stream breaks, the engine says from which block on it threw text away.

use std::collections::HashSet;

use crate::{
    event::ItemKey,
    limit,
    translate::{Output, Partial},
};

/// What a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockKind {
    Text,
    Reasoning,
    Other,
}

#[derive(Debug)]
struct Block {
    index: u64,
    kind: BlockKind,
    /// The text so far, at most [`limit::ANSWER_LIMIT`] bytes.
    text: String,
    /// How many bytes there were in all.
    length: u64,
    finished: bool,
}

/// The message that one agent (the main one, or a sub-agent by its call) is saying.
#[derive(Debug)]
struct Lane {
    parent: Option<String>,
    message: String,
    blocks: Vec<Block>,
}

/// A block that will get no final line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unfinished {
    pub(super) key: ItemKey,
    pub(super) kind: BlockKind,
    pub(super) text: String,
    pub(super) parent: Option<String>,
}

/// Every message in progress.
#[derive(Debug, Default)]
pub(super) struct Items {
    lanes: Vec<Lane>,
    /// The items whose whole text was told. Their names are never used again.
    told: HashSet<ItemKey>,
}

fn key(message: &str, index: u64) -> ItemKey {
    ItemKey(format!("{}.{index}", limit::prefix(message, 200)))
}

impl Lane {
    /// Throws away the text of unfinished blocks from `from` on.
    fn abandon(&mut self, from: u64, out: &mut Vec<Output>) {
        let message = &self.message;
        self.blocks.retain(|block| {
            let thrown = !block.finished && block.index >= from;
            if thrown && block.length > 0 {
                out.push(Output::PartialReset { item: key(message, block.index) });
            }
            !thrown
        });
    }
}

impl Items {
    fn lane(&mut self, parent: Option<&str>) -> Option<&mut Lane> {
        self.lanes.iter_mut().find(|lane| lane.parent.as_deref() == parent)
    }

    /// Turns to a message. Whatever the agent's previous one left unfinished is thrown away.
    pub(super) fn turn_to(&mut self, parent: Option<&str>, message: &str, out: &mut Vec<Output>) {
        match self.lane(parent) {
            Some(lane) if lane.message == message => {}
            Some(lane) => {
                lane.abandon(0, out);
                lane.blocks.clear();
                message.clone_into(&mut lane.message);
            }
            None => self.lanes.push(Lane {
                parent: parent.map(str::to_owned),
                message: message.to_owned(),
                blocks: Vec::new(),
            }),
        }
    }

    /// A block begins.
    pub(super) fn start(&mut self, parent: Option<&str>, index: u64, kind: BlockKind) {
        if let Some(lane) = self.lane(parent)
            && !lane.blocks.iter().any(|block| block.index == index)
        {
            lane.blocks.push(Block { index, kind, text: String::new(), length: 0, finished: false });
        }
    }

    /// Text of a block arrives.
    pub(super) fn append(
        &mut self,
        parent: Option<&str>,
        index: u64,
        kind: BlockKind,
        text: &str,
    ) -> Option<Partial> {
        self.start(parent, index, kind);
        let place = self.lanes.iter().position(|lane| lane.parent.as_deref() == parent)?;
        let item = key(&self.lanes[place].message, index);
        if self.told.contains(&item) {
            return None;
        }
        let lane = &mut self.lanes[place];
        let block = lane.blocks.iter_mut().find(|block| block.index == index && !block.finished)?;
        let offset = block.length;
        block.length += text.len() as u64;
        let room = limit::ANSWER_LIMIT - block.text.len();
        block.text.push_str(limit::prefix(text, room));
        Some(Partial {
            item,
            reasoning: block.kind == BlockKind::Reasoning,
            offset,
            text: text.to_owned(),
            parent_call: lane.parent.clone(),
        })
    }

    /// The engine says from which block on it threw text away.
    pub(super) fn abandon(&mut self, parent: Option<&str>, from: u64, out: &mut Vec<Output>) {
        if let Some(lane) = self.lane(parent) {
            lane.abandon(from, out);
        }
    }

    /// The final line of a block has come: its name.
    pub(super) fn finish(
        &mut self,
        parent: Option<&str>,
        message: &str,
        kind: BlockKind,
        out: &mut Vec<Output>,
    ) -> ItemKey {
        self.turn_to(parent, message, out);
        let place = self.lanes.iter().position(|lane| lane.parent.as_deref() == parent);
        let mut index = place.map_or(0, |place| Self::finish_block(&mut self.lanes[place], kind));
        while !self.told.insert(key(message, index)) {
            index += 1;
        }
        key(message, index)
    }

    /// The index of the block that a final line of this kind finishes.
    fn finish_block(lane: &mut Lane, kind: BlockKind) -> u64 {
        let streamed = lane.blocks.iter_mut().find(|block| !block.finished && block.kind == kind);
        match streamed {
            Some(block) => {
                block.finished = true;
                block.text = String::new();
                block.index
            }
            // It was not streamed: the next free place.
            None => {
                let index = lane.blocks.iter().map(|block| block.index + 1).max().unwrap_or(0);
                lane.blocks.push(Block { index, kind, text: String::new(), length: 0, finished: true });
                index
            }
        }
    }

    /// Takes out every block that has text and will get no final line.
    pub(super) fn drain(&mut self) -> Vec<Unfinished> {
        let mut left = Vec::new();
        for lane in std::mem::take(&mut self.lanes) {
            for block in lane.blocks {
                let open = !block.finished && block.kind != BlockKind::Other && !block.text.is_empty();
                if open && self.told.insert(key(&lane.message, block.index)) {
                    left.push(Unfinished {
                        key: key(&lane.message, block.index),
                        kind: block.kind,
                        text: block.text,
                        parent: lane.parent.clone(),
                    });
                }
            }
        }
        left
    }

    /// Every unfinished text from its beginning.
    pub(super) fn snapshot(&self) -> Vec<Partial> {
        let mut partials = Vec::new();
        for lane in &self.lanes {
            for block in &lane.blocks {
                if !block.finished && block.kind != BlockKind::Other && !block.text.is_empty() {
                    partials.push(Partial {
                        item: key(&lane.message, block.index),
                        reasoning: block.kind == BlockKind::Reasoning,
                        offset: 0,
                        text: block.text.clone(),
                        parent_call: lane.parent.clone(),
                    });
                }
            }
        }
        partials
    }
}

//! The front matter as a tree with lines, from the events of the YAML parser.
//!
//! The parser's own loader would resolve aliases, drop tags and let the last of two equal keys win; from
//! its events all of that can be refused where it stands.

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

use super::error::Problem;

/// Deeper nesting than any agent file can have; it also bounds the recursion that drops a tree.
const MAX_DEPTH: usize = 8;

/// A value with the line in which it begins.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) line: usize,
    pub(super) value: Value,
}

/// What a value is.
#[derive(Debug)]
pub(super) enum Value {
    /// Text; `plain` when it is not quoted and no block scalar, so that it may be a number or the like.
    Scalar { text: String, plain: bool },
    /// A list.
    List(Vec<Node>),
    /// A mapping in the order of the file, duplicates included.
    Mapping(Vec<(Key, Node)>),
    /// Something that has been refused already: nothing more is to be said of it.
    Refused,
}

/// A key of a mapping. The text is empty when the key was refused.
#[derive(Debug, Clone)]
pub(super) struct Key {
    pub(super) line: usize,
    pub(super) text: String,
    pub(super) refused: bool,
}

/// Something wrong, with its line (of the file) and field.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) line: usize,
    pub(super) field: String,
    pub(super) problem: Problem,
}

/// A front matter as far as it could be read.
#[derive(Debug)]
pub(super) struct Tree {
    /// The document's value, if there is one.
    pub(super) root: Option<Node>,
    /// What was wrong.
    pub(super) faults: Vec<Fault>,
    /// False when reading stopped in the middle: then missing keys mean nothing.
    pub(super) complete: bool,
}

/// A collection that is not finished yet.
enum Open {
    List { line: usize, items: Vec<Node>, refused: bool },
    Mapping { line: usize, entries: Vec<(Key, Node)>, key: Option<Key>, refused: bool },
}

struct Builder {
    open: Vec<Open>,
    root: Option<Node>,
    faults: Vec<Fault>,
    documents: usize,
}

/// Reads a front matter whose first line is line `first_line` of the file.
pub(super) fn read(front_matter: &str, first_line: usize) -> Tree {
    let mut builder = Builder { open: Vec::new(), root: None, faults: Vec::new(), documents: 0 };
    let mut complete = true;
    for event in Parser::new_from_str(front_matter) {
        match event {
            Ok((event, span)) => {
                if !builder.take(event, line_of(&span, first_line)) {
                    complete = false;
                    break;
                }
            }
            Err(error) => {
                // The parser knows only anchors that it has seen; to the reader it is an alias all the same.
                let problem = if error.info().contains("unknown anchor") {
                    Problem::Alias
                } else {
                    Problem::Yaml { message: error.info().to_owned() }
                };
                let line = error.marker().line().max(1) + first_line - 1;
                builder.fault(line, problem);
                complete = false;
                break;
            }
        }
    }
    while let Some(open) = builder.open.pop() {
        let node = open.close();
        builder.put(node);
    }
    Tree { root: builder.root, faults: builder.faults, complete }
}

fn line_of(span: &Span, first_line: usize) -> usize {
    span.start.line().max(1) + first_line - 1
}

impl Open {
    fn close(self) -> Node {
        match self {
            Self::List { line, items, refused } => {
                Node { line, value: if refused { Value::Refused } else { Value::List(items) } }
            }
            Self::Mapping { line, entries, refused, .. } => {
                Node { line, value: if refused { Value::Refused } else { Value::Mapping(entries) } }
            }
        }
    }
}

impl Builder {
    /// Takes one event; false when reading must stop.
    fn take(&mut self, event: Event<'_>, line: usize) -> bool {
        match event {
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => {}
            Event::DocumentStart(explicit) => {
                self.documents += 1;
                if explicit || self.documents > 1 {
                    self.faults.push(Fault {
                        line,
                        field: "front matter".to_owned(),
                        problem: Problem::SecondDocument,
                    });
                    return false;
                }
            }
            Event::Alias(_) => {
                self.fault(line, Problem::Alias);
                self.put(Node { line, value: Value::Refused });
            }
            Event::Scalar(text, style, anchor, tag) => {
                let plain = style == ScalarStyle::Plain;
                let refused = self.refuse_marks(line, anchor, tag.is_some());
                let value =
                    if refused { Value::Refused } else { Value::Scalar { text: text.into_owned(), plain } };
                self.put(Node { line, value });
            }
            Event::SequenceStart(anchor, tag) => {
                let refused = self.refuse_marks(line, anchor, tag.is_some());
                if !self.may_open(line) {
                    return false;
                }
                self.open.push(Open::List { line, items: Vec::new(), refused });
            }
            Event::MappingStart(anchor, tag) => {
                let refused = self.refuse_marks(line, anchor, tag.is_some());
                if !self.may_open(line) {
                    return false;
                }
                self.open.push(Open::Mapping { line, entries: Vec::new(), key: None, refused });
            }
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some(open) = self.open.pop() {
                    let node = open.close();
                    self.put(node);
                }
            }
        }
        true
    }

    fn refuse_marks(&mut self, line: usize, anchor: usize, tagged: bool) -> bool {
        if anchor > 0 {
            self.fault(line, Problem::Anchor);
        }
        if tagged {
            self.fault(line, Problem::Tag);
        }
        anchor > 0 || tagged
    }

    fn may_open(&mut self, line: usize) -> bool {
        if self.open.len() < MAX_DEPTH {
            return true;
        }
        self.fault(line, Problem::TooDeep);
        false
    }

    /// Puts a finished value where it belongs: into a list, as the key or the value of a mapping, or as
    /// the document's value.
    fn put(&mut self, node: Node) {
        let fault = match self.open.last_mut() {
            None => {
                self.root = Some(node);
                return;
            }
            Some(Open::List { items, .. }) => {
                items.push(node);
                return;
            }
            Some(Open::Mapping { entries, key, .. }) => match key.take() {
                Some(key) => {
                    entries.push((key, node));
                    return;
                }
                None => {
                    let line = node.line;
                    let (text, refused, fault) = match node.value {
                        Value::Scalar { text, .. } => (text, false, false),
                        Value::Refused => (String::new(), true, false),
                        Value::List(_) | Value::Mapping(_) => (String::new(), true, true),
                    };
                    *key = Some(Key { line, text, refused });
                    fault.then_some(line)
                }
            },
        };
        if let Some(line) = fault {
            self.fault(line, Problem::KeyNotText);
        }
    }

    fn fault(&mut self, line: usize, problem: Problem) {
        let field = self.path();
        self.faults.push(Fault { line, field, problem });
    }

    /// The field that is being read.
    fn path(&self) -> String {
        let mut path = String::new();
        for open in &self.open {
            match open {
                Open::Mapping { key: Some(key), .. } => {
                    if !path.is_empty() {
                        path.push('.');
                    }
                    path.push_str(&super::fields::shown(&key.text));
                }
                Open::Mapping { key: None, .. } => {}
                Open::List { items, .. } => path.push_str(&format!("[{}]", items.len())),
            }
        }
        if path.is_empty() { "front matter".to_owned() } else { path }
    }
}

//! Keeping known secret values out of what is written.
//!
//! A secret is looked for as it is, as it looks inside a JSON string, and, when it has several lines, line by line.
//! Overlapping finds are masked as one. What remains visible holds no secret whole.

use crate::plan::{SECRET_MIN_BYTES, Secret};
use memchr::memmem::Finder;
use std::collections::BTreeSet;
use std::ops::Range;

/// What stands in a secret's place. It is harmless inside JSON.
pub(crate) const MASK: &[u8] = b"[masked]";

/// Masks whole texts.
#[derive(Debug, Clone)]
pub struct Masker {
    finders: Vec<Finder<'static>>,
    longest: usize,
    unmasked: u32,
}

impl Masker {
    /// A masker for these values. Those under [`SECRET_MIN_BYTES`] are left out and counted.
    #[must_use]
    pub fn new(secrets: &[Secret]) -> Self {
        let mut needles = BTreeSet::new();
        let mut unmasked = 0;
        for secret in secrets {
            let value = secret.expose();
            if value.len() < SECRET_MIN_BYTES {
                unmasked += u32::from(!value.is_empty());
                continue;
            }
            for form in forms(value) {
                if form.len() >= SECRET_MIN_BYTES {
                    needles.insert(form);
                }
            }
        }
        let longest = needles.iter().map(Vec::len).max().unwrap_or(0);
        let finders = needles.iter().map(|needle| Finder::new(needle).into_owned()).collect();
        Self { finders, longest, unmasked }
    }

    /// How many values were too short.
    #[must_use]
    pub fn unmasked(&self) -> u32 {
        self.unmasked
    }

    /// The text with secrets masked; none when there is none in it.
    #[must_use]
    pub fn mask(&self, text: &[u8]) -> Option<Vec<u8>> {
        let found = self.find(text);
        (!found.is_empty()).then(|| replace(text, &found, text.len()))
    }

    /// The first `length` bytes of the text with secrets masked, also one that the cut goes through; and whether there
    /// was any.
    #[must_use]
    pub fn mask_head(&self, text: &[u8], length: usize) -> (Vec<u8>, bool) {
        let length = length.min(text.len());
        let seen = &text[..text.len().min(length.saturating_add(self.longest))];
        let found = self.find(seen);
        let masked = found.first().is_some_and(|range| range.start < length);
        (replace(seen, &found, length), masked)
    }

    /// Where secrets lie, merged and in order.
    fn find(&self, text: &[u8]) -> Vec<Range<usize>> {
        let mut found: Vec<Range<usize>> = Vec::new();
        for finder in &self.finders {
            let length = finder.needle().len();
            let mut from = 0;
            while let Some(at) = finder.find(&text[from..]) {
                let start = from + at;
                match found.last_mut() {
                    // A value that repeats itself is found at every step: kept as one range at once.
                    Some(last) if last.start <= start && start < last.end => {
                        last.end = last.end.max(start + length)
                    }
                    _ => found.push(start..start + length),
                }
                from = start + 1;
            }
        }
        merge(found)
    }

    /// The length of the longest end of `text` that a secret could begin with.
    fn open_end(&self, text: &[u8]) -> usize {
        let mut longest = 0;
        for finder in &self.finders {
            let needle = finder.needle();
            let most = (needle.len() - 1).min(text.len());
            if let Some(length) = (longest + 1..=most).rev().find(|length| text.ends_with(&needle[..*length]))
            {
                longest = length;
            }
        }
        longest
    }
}

fn forms(value: &[u8]) -> Vec<Vec<u8>> {
    let mut forms = vec![value.to_vec()];
    let text = std::str::from_utf8(value).ok();
    if let Some(json) = text.and_then(|text| serde_json::to_string(text).ok()) {
        let inner = &json[1..json.len() - 1];
        forms.push(inner.as_bytes().to_vec());
        forms.push(inner.replace('/', "\\/").into_bytes());
        if !inner.is_ascii() {
            let mut ascii = String::new();
            for character in inner.chars() {
                if character.is_ascii() {
                    ascii.push(character);
                } else {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        ascii.push_str(&format!("\\u{unit:04x}"));
                    }
                }
            }
            forms.push(ascii.into_bytes());
        }
    }
    if value.contains(&b'\n') {
        forms.extend(value.split(|byte| *byte == b'\n').map(|line| line.trim_ascii().to_vec()));
    }
    forms
}

fn merge(mut found: Vec<Range<usize>>) -> Vec<Range<usize>> {
    found.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<usize>> = Vec::with_capacity(found.len());
    for range in found {
        match merged.last_mut() {
            Some(last) if range.start < last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

fn replace(text: &[u8], found: &[Range<usize>], length: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(length);
    let mut from = 0;
    for range in found {
        if range.start >= length {
            break;
        }
        out.extend_from_slice(&text[from..range.start]);
        out.extend_from_slice(MASK);
        from = range.end;
    }
    if from < length {
        out.extend_from_slice(&text[from..length]);
    }
    out
}

/// Masks a stream that comes in pieces. Only an end that a secret could begin with is held back until more comes.
#[derive(Debug)]
pub struct StreamMasker {
    masker: Masker,
    held: Vec<u8>,
    /// So many bytes of `held` belong to a secret whose mask is out already.
    covered: usize,
}

impl StreamMasker {
    /// A masker at the beginning of a stream.
    #[must_use]
    pub fn new(masker: Masker) -> Self {
        Self { masker, held: Vec::new(), covered: 0 }
    }

    /// Takes the next piece and appends what is safe to `out`; true when a secret was masked in it.
    pub fn feed(&mut self, piece: &[u8], out: &mut Vec<u8>) -> bool {
        self.held.extend_from_slice(piece);
        let safe = self.held.len() - self.masker.open_end(&self.held);
        self.emit(safe, out)
    }

    /// The stream ended, or paused for long: appends what was held back.
    pub fn finish(&mut self, out: &mut Vec<u8>) -> bool {
        self.emit(self.held.len(), out)
    }

    fn emit(&mut self, safe: usize, out: &mut Vec<u8>) -> bool {
        if safe == 0 {
            return false;
        }
        let mut found = self.masker.find(&self.held);
        if self.covered > 0 {
            found.push(0..self.covered);
            found = merge(found);
        }
        let mut masked = false;
        let mut from = 0;
        for range in &found {
            if range.start >= safe {
                break;
            }
            out.extend_from_slice(&self.held[from..range.start]);
            if !(range.start == 0 && self.covered > 0) {
                out.extend_from_slice(MASK);
                masked = true;
            }
            from = range.end;
        }
        if from < safe {
            out.extend_from_slice(&self.held[from..safe]);
        }
        self.covered = from.saturating_sub(safe);
        self.held.drain(..safe);
        masked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn masker(secrets: &[&str]) -> Masker {
        Masker::new(&secrets.iter().map(|secret| Secret::new(*secret)).collect::<Vec<_>>())
    }

    fn stream(secrets: &[&str], pieces: &[&[u8]]) -> Vec<u8> {
        let mut stream = StreamMasker::new(masker(secrets));
        let mut out = Vec::new();
        for piece in pieces {
            stream.feed(piece, &mut out);
        }
        stream.finish(&mut out);
        out
    }

    #[test]
    fn values_are_masked_raw_and_as_in_json() {
        let masker = masker(&["sk-a\"b/c\\d"]);
        assert_eq!(masker.mask(b"x sk-a\"b/c\\d y").unwrap(), b"x [masked] y");
        assert_eq!(masker.mask(br#"{"k":"sk-a\"b/c\\d"}"#).unwrap(), br#"{"k":"[masked]"}"#);
        assert_eq!(masker.mask(br#"{"k":"sk-a\"b\/c\\d"}"#).unwrap(), br#"{"k":"[masked]"}"#);
        assert_eq!(masker.mask(b"nothing here"), None);
    }

    #[test]
    fn each_line_of_a_value_is_masked_and_short_values_are_counted() {
        let masker = masker(&["first-line\nsecond-line\n", "abc", ""]);
        assert_eq!(masker.mask(b"second-line").unwrap(), MASK);
        assert_eq!(masker.mask(br"first-line\nsecond-line\n").unwrap(), MASK);
        assert_eq!(masker.unmasked(), 1);
        assert_eq!(masker.mask(b"abc"), None);
    }

    #[test]
    fn overlapping_values_are_masked_as_one() {
        assert_eq!(masker(&["abcdef", "defghi"]).mask(b"-abcdefghi-").unwrap(), b"-[masked]-");
        assert_eq!(masker(&["aaaaaa"]).mask(b"aaaaaaaaaaaaab").unwrap(), b"[masked]b");
    }

    #[test]
    fn a_head_never_ends_in_half_a_secret() {
        let masker = masker(&["secret-value"]);
        assert_eq!(masker.mask_head(b"0123 secret-value 789", 9), (b"0123 [masked]".to_vec(), true));
        assert_eq!(masker.mask_head(b"0123 secret-value 789", 5), (b"0123 ".to_vec(), false));
        assert_eq!(masker.mask_head(b"0123", 9), (b"0123".to_vec(), false));
    }

    #[test]
    fn a_secret_across_pieces_is_masked_at_every_cut() {
        let text = b"12 secret-value 34 secret-valu";
        for cut in 0..=text.len() {
            assert_eq!(
                stream(&["secret-value"], &[&text[..cut], &text[cut..]]),
                b"12 [masked] 34 secret-valu",
                "cut at {cut}"
            );
        }
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(stream(&["secret-value"], &bytes), b"12 [masked] 34 secret-valu");
    }

    #[test]
    fn an_end_that_may_begin_the_next_find_is_not_told_twice() {
        let pieces: Vec<&[u8]> = b"babaababaabx babaabab".chunks(1).collect();
        assert_eq!(stream(&["babaab"], &pieces), b"[masked]x [masked]ab");
    }

    proptest! {
        /// However the stream is cut, it comes out as the whole text does.
        #[test]
        fn cuts_change_nothing(
            text in "[ab]{0,60}",
            secrets in proptest::collection::vec("[ab]{6,9}", 0..4),
            size in 1usize..8,
        ) {
            let secrets: Vec<&str> = secrets.iter().map(String::as_str).collect();
            let whole = masker(&secrets).mask(text.as_bytes()).unwrap_or_else(|| text.clone().into_bytes());
            for secret in &secrets {
                prop_assert!(!String::from_utf8(whole.clone()).unwrap().contains(secret));
            }
            let pieces: Vec<&[u8]> = text.as_bytes().chunks(size).collect();
            prop_assert_eq!(stream(&secrets, &pieces), whole);
        }
    }
}

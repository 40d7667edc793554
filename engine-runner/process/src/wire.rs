//! The byte encoding shared by frames, protocol messages and the launch plan.
//!
//! Integers are little-endian and of fixed width; byte strings carry a `u32` length before them. Reading is total:
//! any input gives a value or [`WireError`], never a panic, and never an allocation larger than the input.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::time::Duration;

/// Why bytes could not be read as what they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The input ends before the value does.
    #[error("input ends inside {0}")]
    Short(&'static str),
    /// The input goes on after the value's end.
    #[error("{0} bytes left over")]
    LeftOver(usize),
    /// A value that no version of this code writes.
    #[error("invalid {0}")]
    Invalid(&'static str),
}

/// Collects an encoding.
#[derive(Debug, Default)]
pub(crate) struct Put(pub(crate) Vec<u8>);

impl Put {
    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    pub(crate) fn bool(&mut self, value: bool) -> &mut Self {
        self.u8(u8::from(value))
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn i32(&mut self, value: i32) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn duration(&mut self, value: Duration) -> &mut Self {
        self.u64(u64::try_from(value.as_millis()).unwrap_or(u64::MAX))
    }

    /// A byte string. What is longer than `u32::MAX` is cut there: all inputs are bounded far below it by their owners.
    pub(crate) fn bytes(&mut self, value: &[u8]) -> &mut Self {
        let length = u32::try_from(value.len()).unwrap_or(u32::MAX);
        self.u32(length);
        self.0.extend_from_slice(&value[..usize::try_from(length).unwrap_or(value.len())]);
        self
    }

    pub(crate) fn str(&mut self, value: &str) -> &mut Self {
        self.bytes(value.as_bytes())
    }

    pub(crate) fn os(&mut self, value: &std::ffi::OsStr) -> &mut Self {
        self.bytes(value.as_bytes())
    }

    pub(crate) fn option<T>(&mut self, value: Option<T>, put: impl FnOnce(&mut Self, T)) -> &mut Self {
        match value {
            None => self.u8(0),
            Some(value) => {
                self.u8(1);
                put(self, value);
                self
            }
        }
    }
}

/// Reads an encoding from its start.
#[derive(Debug)]
pub(crate) struct Take<'a>(&'a [u8]);

impl<'a> Take<'a> {
    pub(crate) fn new(input: &'a [u8]) -> Self {
        Self(input)
    }

    fn raw(&mut self, length: usize, what: &'static str) -> Result<&'a [u8], WireError> {
        if self.0.len() < length {
            return Err(WireError::Short(what));
        }
        let (head, rest) = self.0.split_at(length);
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], WireError> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(WireError::Short(what))?;
        self.0 = rest;
        Ok(*head)
    }

    pub(crate) fn u8(&mut self, what: &'static str) -> Result<u8, WireError> {
        Ok(u8::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn bool(&mut self, what: &'static str) -> Result<bool, WireError> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(WireError::Invalid(what)),
        }
    }

    pub(crate) fn u16(&mut self, what: &'static str) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn i32(&mut self, what: &'static str) -> Result<i32, WireError> {
        Ok(i32::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn duration(&mut self, what: &'static str) -> Result<Duration, WireError> {
        Ok(Duration::from_millis(self.u64(what)?))
    }

    pub(crate) fn bytes(&mut self, what: &'static str) -> Result<&'a [u8], WireError> {
        let length = usize::try_from(self.u32(what)?).map_err(|_| WireError::Invalid(what))?;
        self.raw(length, what)
    }

    pub(crate) fn string(&mut self, what: &'static str) -> Result<String, WireError> {
        let bytes = self.bytes(what)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| WireError::Invalid(what))
    }

    pub(crate) fn os(&mut self, what: &'static str) -> Result<OsString, WireError> {
        Ok(OsString::from_vec(self.bytes(what)?.to_vec()))
    }

    pub(crate) fn option<T>(
        &mut self,
        what: &'static str,
        take: impl FnOnce(&mut Self) -> Result<T, WireError>,
    ) -> Result<Option<T>, WireError> {
        if self.bool(what)? { take(self).map(Some) } else { Ok(None) }
    }

    /// All that is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// Refuses bytes after the value's end.
    pub(crate) fn end(self) -> Result<(), WireError> {
        if self.0.is_empty() { Ok(()) } else { Err(WireError::LeftOver(self.0.len())) }
    }
}

/// Gives a fieldless enum its code on disk and on the wire, and the way back.
macro_rules! codes {
    ($name:ty, $what:literal, { $($variant:ident = $code:literal),+ $(,)? }) => {
        impl $name {
            pub(crate) fn code(self) -> u8 {
                match self { $(Self::$variant => $code),+ }
            }
            pub(crate) fn take(take: &mut Take<'_>) -> Result<Self, WireError> {
                match take.u8($what)? {
                    $($code => Ok(Self::$variant),)+
                    _ => Err(WireError::Invalid($what)),
                }
            }
        }
    };
}
pub(crate) use codes;

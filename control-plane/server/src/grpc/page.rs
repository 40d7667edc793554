//! Page tokens: the id of the last item, wrapped so that nobody takes it for one.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::error::{Error, Result};

/// What tokens of this form begin with, so that another form can be told apart later.
const VERSION: &str = "1:";

/// The token for the page after the item `last`.
pub(crate) fn token(last: &str) -> String {
    URL_SAFE_NO_PAD.encode(format!("{VERSION}{last}"))
}

/// The item after which a page begins; none for the first page.
pub(crate) fn after(token: &str) -> Result<Option<String>> {
    if token.is_empty() {
        return Ok(None);
    }
    let refused = || Error::field("page_token", "is not from an earlier answer of this call");
    let bytes = URL_SAFE_NO_PAD.decode(token).map_err(|_| refused())?;
    let text = String::from_utf8(bytes).map_err(|_| refused())?;
    text.strip_prefix(VERSION).map(|last| Some(last.to_owned())).ok_or_else(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_gives_the_item_back_and_anything_else_is_refused() {
        assert_eq!(after(&token("trn_1")), Ok(Some("trn_1".to_owned())));
        assert_eq!(after(""), Ok(None));
        for bad in ["trn_1", "!!", "Mjp0cm5fMQ"] {
            assert!(after(bad).is_err(), "{bad}");
        }
    }
}

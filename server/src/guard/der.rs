//! The little of DER that certificates and public keys need: elements one after the other.

/// Tags that are looked for.
pub(super) const BIT_STRING: u8 = 0x03;
pub(super) const OCTET_STRING: u8 = 0x04;
pub(super) const OBJECT_ID: u8 = 0x06;
pub(super) const UTF8_STRING: u8 = 0x0c;
pub(super) const PRINTABLE_STRING: u8 = 0x13;
pub(super) const IA5_STRING: u8 = 0x16;
pub(super) const UTC_TIME: u8 = 0x17;
pub(super) const GENERALIZED_TIME: u8 = 0x18;
pub(super) const SEQUENCE: u8 = 0x30;
pub(super) const SET: u8 = 0x31;

/// Reads elements from the front of a slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Elements<'a>(pub(super) &'a [u8]);

impl<'a> Elements<'a> {
    /// The next element if it has this tag.
    pub(super) fn element(&mut self, tag: u8) -> Option<&'a [u8]> {
        let before = *self;
        match self.next() {
            Some((found, content)) if found == tag => Some(content),
            _ => {
                *self = before;
                None
            }
        }
    }

    /// The elements within the next one, which must have this tag.
    pub(super) fn enter(&mut self, tag: u8) -> Option<Elements<'a>> {
        self.element(tag).map(Elements)
    }
}

impl<'a> Iterator for Elements<'a> {
    type Item = (u8, &'a [u8]);

    /// None at the end, and where the bytes make no sense.
    fn next(&mut self) -> Option<Self::Item> {
        let (&tag, rest) = self.0.split_first()?;
        let (&first, rest) = rest.split_first()?;
        let (length, rest) = match first {
            0..=0x7f => (usize::from(first), rest),
            0x81..=0x84 => {
                let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
                let length = digits
                    .iter()
                    .fold(0u32, |length, &digit| length << 8 | u32::from(digit));
                (usize::try_from(length).ok()?, rest)
            }
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some((tag, content))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_read_in_order_and_broken_ones_end_it() {
        let bytes = [0x02, 0x01, 0x05, 0x30, 0x81, 0x02, 0x06, 0x00, 0x04, 0x7f];
        let mut elements = Elements(&bytes);
        assert_eq!(elements.element(SEQUENCE), None);
        assert_eq!(elements.next(), Some((0x02, &[5u8][..])));
        let mut inner = elements.enter(SEQUENCE).unwrap();
        assert_eq!(inner.element(OBJECT_ID), Some(&[][..]));
        assert_eq!(elements.next(), None);
        assert_eq!(Elements(&[0x30, 0x80, 0, 0]).next(), None);
        assert_eq!(Elements(&[0x30, 0x84, 0xff, 0xff, 0xff, 0xff]).next(), None);
    }
}

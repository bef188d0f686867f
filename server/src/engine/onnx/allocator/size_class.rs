//! Sizes of large blocks: eight to each doubling, so that a block of its class is at most an
//! eighth larger than what was asked for.

/// The smallest mapping, as a power of two: below it the heap is cheaper.
const SMALLEST_BITS: u32 = 16;
/// The largest: no process has more address space.
const LARGEST_BITS: u32 = 46;
const STEPS_BITS: u32 = 3;
const STEPS: usize = 1 << STEPS_BITS;

/// From here on blocks are mapped.
pub(super) const SMALLEST: usize = 1 << SMALLEST_BITS;
/// How many classes there are.
pub(super) const COUNT: usize = (LARGEST_BITS - SMALLEST_BITS) as usize * STEPS + 1;

/// The least class that holds `bytes`; none when no class does.
pub(super) fn of(bytes: usize) -> Option<usize> {
    let bytes = bytes.max(SMALLEST);
    let bits = bytes.ilog2();
    if bits > LARGEST_BITS {
        return None;
    }
    let step_bits = bits - STEPS_BITS;
    let into = bytes - (1 << bits);
    let steps = into.div_ceil(1 << step_bits);
    let class = (bits - SMALLEST_BITS) as usize * STEPS + steps;
    (class < COUNT).then_some(class)
}

/// How large blocks of a class are.
pub(super) const fn bytes(class: usize) -> usize {
    let bits = SMALLEST_BITS + (class / STEPS) as u32;
    (1 << bits) + ((class % STEPS) << (bits - STEPS_BITS))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_class_holds_what_it_is_chosen_for_and_little_more(bytes in SMALLEST..1usize << 45) {
            let class = of(bytes).unwrap();
            let size = super::bytes(class);
            prop_assert!(size >= bytes);
            prop_assert!(size - bytes <= bytes / 8 + 1);
            prop_assert!(class == 0 || super::bytes(class - 1) < bytes);
        }
    }

    #[test]
    fn every_class_is_its_own() {
        for class in 0..COUNT {
            assert_eq!(of(bytes(class)), Some(class));
            assert!(class + 1 == COUNT || bytes(class) < bytes(class + 1));
            assert!(bytes(class).is_multiple_of(4096));
        }
    }

    #[test]
    fn what_no_process_can_have_has_no_class() {
        assert_eq!(of(usize::MAX), None);
        assert_eq!(of(isize::MAX as usize), None);
        assert_eq!(of((1 << 46) + 1), None);
        assert_eq!(of(1 << 46), Some(COUNT - 1));
    }
}

//! Pseudo-random numbers that a seed repeats.

/// SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    /// The stream `stream` of a seed; streams of one seed do not resemble each other.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut dice = Self(seed ^ stream.wrapping_mul(0xd605_1ab1_6547_b0b5));
        dice.next();
        dice
    }

    /// 64 even bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 for 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// A place in a list of this length.
    pub(crate) fn index(&mut self, length: usize) -> usize {
        self.below(length as u64) as usize
    }

    /// From 0 to below 1.
    pub(crate) fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The time to the next of independent events that come once per unit of time.
    pub(crate) fn exponential(&mut self) -> f64 {
        -(1.0 - self.fraction()).ln()
    }

    /// Around 0, with deviation 1.
    pub(crate) fn normal(&mut self) -> f64 {
        let angle = std::f64::consts::TAU * self.fraction();
        (2.0 * self.exponential()).sqrt() * angle.cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_and_stream_give_the_same_numbers() {
        let draw = |seed, stream| {
            let mut dice = Dice::new(seed, stream);
            [dice.next(), dice.next(), dice.next()]
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
    }

    #[test]
    fn numbers_are_spread_as_their_names_say() {
        let mut dice = Dice::new(7, 0);
        let count = 20_000;
        let mean = (0..count).map(|_| dice.fraction()).sum::<f64>() / f64::from(count);
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        let mean = (0..count).map(|_| dice.exponential()).sum::<f64>() / f64::from(count);
        assert!((mean - 1.0).abs() < 0.03, "{mean}");
        let normal: Vec<f64> = (0..count).map(|_| dice.normal()).collect();
        let mean = normal.iter().sum::<f64>() / f64::from(count);
        let square = normal.iter().map(|value| value * value).sum::<f64>() / f64::from(count);
        assert!(
            mean.abs() < 0.03 && (square - 1.0).abs() < 0.05,
            "{mean} {square}"
        );
        assert!((0..1000).all(|_| dice.index(3) < 3));
        assert_eq!(dice.below(0), 0);
    }
}

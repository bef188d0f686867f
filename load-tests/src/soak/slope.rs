//! How fast a value grows.

/// The slope of the straight line with the least squares, per unit of the first coordinate; 0
/// where fewer than two different moments are known.
pub(super) fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let mean = |part: fn(&(f64, f64)) -> f64| points.iter().map(part).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let (mut together, mut alone) = (0.0, 0.0);
    for point in points {
        together += (point.0 - x) * (point.1 - y);
        alone += (point.0 - x) * (point.0 - x);
    }
    if alone > 0.0 { together / alone } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_its_slope_and_noise_does_not_hide_it() {
        let line: Vec<_> = (0..100)
            .map(|x| (f64::from(x), 3.0 * f64::from(x) + 7.0))
            .collect();
        assert!((slope(&line) - 3.0).abs() < 1e-9);
        let noisy: Vec<_> = line
            .iter()
            .enumerate()
            .map(|(index, &(x, y))| (x, y + if index % 2 == 0 { 20.0 } else { -20.0 }))
            .collect();
        assert!((slope(&noisy) - 3.0).abs() < 0.1);
    }

    #[test]
    fn nothing_grows_where_nothing_is_known() {
        assert_eq!(slope(&[]), 0.0);
        assert_eq!(slope(&[(1.0, 5.0)]), 0.0);
        assert_eq!(slope(&[(1.0, 5.0), (1.0, 9.0)]), 0.0);
    }
}

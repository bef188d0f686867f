//! "Did you mean …?"

/// No field or value has a longer name, and comparing takes time and memory of the product of both
/// lengths.
const LONGEST: usize = 128;

/// The candidate that `word` most likely meant, if one is near enough.
pub(super) fn nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    if word.len() > LONGEST {
        return None;
    }
    // A third of the letters may differ: enough for a missing underscore or a swapped word end.
    let limit = (word.chars().count() / 3).max(1);
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(word, candidate), candidate))
        .filter(|&(distance, _)| distance > 0 && distance <= limit)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}

/// ` (did you mean 'x'?)`, or nothing.
pub(super) fn hint<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    nearest(word, candidates)
        .map(|candidate| format!(" (did you mean '{candidate}'?)"))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_near_names_are_suggested() {
        let fields = ["max_batch_size", "input", "output"];
        assert_eq!(nearest("max_batchsize", fields), Some("max_batch_size"));
        assert_eq!(nearest("inputs", fields), Some("input"));
        assert_eq!(nearest("parameters", fields), None);
    }

    #[test]
    fn a_word_that_is_no_name_is_not_compared() {
        let word = "input".repeat(1 << 20);
        assert_eq!(nearest(&word, ["input"]), None);
    }
}

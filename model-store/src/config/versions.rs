//! Which of a model's versions are served.

use dormouse_proto::inference as pb;
use pb::model_version_policy::PolicyChoice;

/// The versions of `present` that the policy selects, in ascending order.
///
/// No policy, and a policy without a choice, mean the latest version. A specific version that is
/// not there is left out, as Triton does.
pub fn select_versions(policy: Option<&pb::ModelVersionPolicy>, present: &[u64]) -> Vec<u64> {
    let mut versions = present.to_vec();
    versions.sort_unstable();
    versions.dedup();
    match policy.and_then(|policy| policy.policy_choice.as_ref()) {
        None => keep_latest(&mut versions, 1),
        // Zero is the field's default: one version, as if it had not been written.
        Some(PolicyChoice::Latest(latest)) => {
            keep_latest(&mut versions, latest.num_versions.max(1) as usize);
        }
        Some(PolicyChoice::All(_)) => {}
        Some(PolicyChoice::Specific(specific)) => versions.retain(|&version| {
            i64::try_from(version).is_ok_and(|version| specific.versions.contains(&version))
        }),
    }
    versions
}

fn keep_latest(versions: &mut Vec<u64>, count: usize) {
    versions.drain(..versions.len().saturating_sub(count));
}

#[cfg(test)]
mod tests {
    use super::super::text;
    use super::*;

    fn select(policy: &str) -> Vec<u64> {
        let config = text::parse(policy).unwrap();
        select_versions(config.version_policy.as_ref(), &[3, 10, 1, 7])
    }

    #[test]
    fn policies_select_what_triton_selects() {
        assert_eq!(select(""), [10]);
        assert_eq!(select("version_policy {}"), [10]);
        assert_eq!(select("version_policy { latest {} }"), [10]);
        assert_eq!(
            select("version_policy { latest { num_versions: 2 } }"),
            [7, 10]
        );
        assert_eq!(
            select("version_policy { latest { num_versions: 99 } }"),
            [1, 3, 7, 10]
        );
        assert_eq!(select("version_policy { all {} }"), [1, 3, 7, 10]);
        assert_eq!(
            select("version_policy { specific { versions: [ 7, 1, 2, -1 ] } }"),
            [1, 7]
        );
        assert_eq!(select("version_policy { specific {} }"), [] as [u64; 0]);
        assert_eq!(select_versions(None, &[]), [] as [u64; 0]);
    }
}

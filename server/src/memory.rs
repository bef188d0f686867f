//! The process's memory as the operating system sees it.

/// Hands freed heap memory back to the operating system. The allocator keeps it otherwise, so
/// that an unloaded model would still be paid for.
pub fn release_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    trim();
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "glibc's trim has no safe binding")]
fn trim() {
    // SAFETY: `malloc_trim` takes no pointer, locks the allocator itself and may be called from
    // any thread at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The process's resident set, none where `/proc` does not tell.
pub fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(page_size()?)
}

#[expect(unsafe_code, reason = "libc's sysconf has no safe binding here")]
fn page_size() -> Option<u64> {
    // SAFETY: `sysconf` reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).ok().filter(|&size| size > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn resident_set_is_told_in_bytes() {
        let resident = resident_bytes().unwrap();
        assert!(resident > 64 * 1024, "{resident}");
        assert!(resident < 1 << 40, "{resident}");
    }

    #[test]
    fn releasing_memory_leaves_live_data_alone() {
        let kept = vec![7u8; 1 << 20];
        drop(vec![1u8; 1 << 20]);
        release_memory();
        assert!(kept.iter().all(|&byte| byte == 7));
    }
}

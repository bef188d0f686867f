//! Ways for a worker to go wrong on command, so that tests meet real crashes. Debug builds only:
//! a release build has none of them.

/// Where a worker can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Point {
    Open,
    Optimize,
    Run,
}

/// What is to happen to the model of this worker.
#[derive(Clone, Debug, Default)]
pub(super) struct Faults {
    #[cfg(debug_assertions)]
    planned: Vec<(Point, Fault)>,
}

#[cfg(debug_assertions)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Abort,
    Segv,
    Hang,
    /// Takes memory until there is none.
    Hog,
}

#[cfg(debug_assertions)]
impl Faults {
    /// Reads `DORMOUSE_WORKER_FAULTS`: entries `model=point:fault`, separated by commas, as in
    /// `bad=run:segv`. A name ends at the first `=` and is a model's without its version.
    pub(super) fn of(label: &str) -> Self {
        let text = std::env::var("DORMOUSE_WORKER_FAULTS").unwrap_or_default();
        let name = label.rsplit_once('/').map_or(label, |(name, _)| name);
        let planned = text.split(',').filter_map(|entry| {
            let (model, plan) = entry.split_once('=')?;
            let (point, fault) = plan.split_once(':')?;
            let point = match point {
                "open" => Point::Open,
                "optimize" => Point::Optimize,
                "run" => Point::Run,
                _ => return None,
            };
            let fault = match fault {
                "abort" => Fault::Abort,
                "segv" => Fault::Segv,
                "hang" => Fault::Hang,
                "hog" => Fault::Hog,
                _ => return None,
            };
            (model == name).then_some((point, fault))
        });
        Self {
            planned: planned.collect(),
        }
    }

    /// Goes wrong here if that is planned.
    pub(super) fn strike(&self, point: Point) {
        for (_, fault) in self.planned.iter().filter(|(at, _)| *at == point) {
            match fault {
                Fault::Abort => std::process::abort(),
                Fault::Segv => crate::process::crash(),
                Fault::Hang => loop {
                    std::thread::park();
                },
                Fault::Hog => {
                    let mut hoard: Vec<Vec<u8>> = Vec::new();
                    while hoard.len() < 1 << 20 {
                        hoard.push(vec![0; 1 << 24]);
                    }
                }
            }
        }
    }
}

#[cfg(not(debug_assertions))]
impl Faults {
    pub(super) fn of(_: &str) -> Self {
        Self::default()
    }

    pub(super) fn strike(&self, _: Point) {}
}

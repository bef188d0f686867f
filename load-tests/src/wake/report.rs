//! The figures as tables, and the bars they are held against.

use super::measure::CALLERS;
use super::{ABLATIONS, STAGED_EXIT, WakeFigures};
use crate::bars::Bar;
use crate::record::Findings;
use crate::samples::{Samples, mib, times};
use crate::table::Titled;

/// How many times faster than plain ONNX Runtime a model must wake.
const FASTER: [(&str, f64); 3] = [("bert-base", 6.0), ("bert-large", 6.0), ("resnet50", 5.0)];
/// The same while neither side finds its files in the page cache.
const FASTER_COLD: [(&str, f64); 2] = [("bert-base", 6.0), ("bert-large", 6.0)];
/// What a wake is to come near to.
const MOST_OF_FLOOR: f64 = 1.2;
/// Models whose parked answers are judged.
const PARKED: [&str; 2] = ["bert-base", "resnet50"];
const MOST_OF_WARM: f64 = 1.25;
const MOST_OF_DISK: f64 = 1.2;
const MOST_OF_PLAIN_FIRST: f64 = 1.05;
const LEAST_OF_PLAIN_STEADY: f64 = 0.97;
/// Differences between floats that are no mistake: weights may be packed or not.
const MOST_DIFFERENT: f64 = 1e-3;

impl Findings for Vec<WakeFigures> {
    fn about(&self) -> String {
        "How long a model takes from zero to its first answer through gRPC. \"Plain\" is ONNX \
         Runtime's default session opened from the model's file and run once, in the same process; \
         \"floor\" is touching every page of the file once plus one warm run. Ratios are medians \
         over the repetitions. Where answers per second are compared, plain is measured twice: in a loop \
         that calls it, which no server can keep up with when a run takes less than a message, and \
         behind the least that a gRPC server must do."
            .to_owned()
    }

    fn tables(&self) -> Vec<Titled> {
        let mut tables = vec![
            rows(
                "Wake from zero, weights in the page cache; ms",
                &[
                    "model",
                    "file, MiB",
                    "plain",
                    "Dormouse",
                    "times faster",
                    "floor",
                    "of the floor",
                    "largest difference",
                ],
                self,
                |of| {
                    vec![
                        crate::table::number(mib(of.file_bytes)),
                        of.plain.cell(),
                        of.wake.cell(),
                        times(of.plain.over(&of.wake)),
                        of.floor.cell(),
                        times(of.wake.over(&of.floor)),
                        format!("{:.0e}", of.largest_difference),
                    ]
                },
            ),
            rows(
                "What these times are made of; ms",
                &[
                    "model",
                    "plain: opening",
                    "plain: a warm run",
                    "floor: touching the file",
                    "Dormouse: loading",
                    "Dormouse: loading the first time ever",
                ],
                self,
                |of| {
                    vec![
                        of.plain_open.cell(),
                        of.plain_warm.cell(),
                        of.touch.cell(),
                        of.wake_load.cell(),
                        of.first_ever_load.cell(),
                    ]
                },
            ),
            pairs(
                "The next answer of a parked model, beside that of a warm one; ms",
                ("warm", "parked", "parked/warm"),
                self,
                |of| (&of.parked_warm, &of.parked),
            ),
        ];
        if self.iter().any(|of| !of.wake_cold.0.is_empty()) {
            tables.push(rows(
                "Wake from zero, nothing in the page cache; ms",
                &[
                    "model",
                    "plain",
                    "Dormouse",
                    "times faster",
                    "the disk alone: reading the store's files",
                    "of the disk alone",
                ],
                self,
                |of| {
                    vec![
                        of.plain_cold.cell(),
                        of.wake_cold.cell(),
                        times(of.plain_cold.over(&of.wake_cold)),
                        of.disk.cell(),
                        times(of.wake_cold.over(&of.disk)),
                    ]
                },
            ));
        }
        tables.push(pairs(
            "The first answer ever, before the model is prepared; ms",
            ("plain", "Dormouse", "Dormouse/plain"),
            self,
            |of| (&of.plain, &of.first_ever),
        ));
        tables.push(steady("Steady state, one caller", self, |of| {
            [&of.steady_plain, &of.steady_bare, &of.steady]
        }));
        let title = format!("Throughput, {CALLERS} callers");
        tables.push(steady(&title, self, |of| {
            [&of.throughput_plain, &of.throughput_bare, &of.throughput]
        }));
        tables.extend(ablations(self));
        tables
    }

    fn notes(&self) -> Vec<String> {
        let packed = self.iter().filter(|of| of.packed);
        let packed: Vec<&str> = packed.map(|of| &*of.model).collect();
        let mut notes = Vec::new();
        if !packed.is_empty() {
            notes.push(format!(
                "In the steady state these had packed weights by then: {}.",
                packed.join(", ")
            ));
        }
        for of in self {
            notes.extend(of.notes.iter().map(|note| format!("{}: {note}.", of.model)));
        }
        notes
    }

    fn bars(&self) -> Vec<Bar> {
        let limit = |of: &WakeFigures, limits: &[(&str, f64)]| {
            let mut limits = limits.iter();
            limits
                .find(|(model, _)| *model == of.model)
                .map(|found| found.1)
        };
        let each = |bar: &dyn Fn(&WakeFigures) -> Option<Bar>| {
            self.iter()
                .filter_map(|of| {
                    let bar = bar(of)?;
                    let name = format!("{}: {}", of.model, bar.name);
                    Some(Bar { name, ..bar })
                })
                .collect::<Vec<_>>()
        };
        [
            each(&|of| {
                let least = limit(of, &FASTER).unwrap_or(1.0);
                let ratio = of.plain.over(&of.wake);
                Some(Bar::least("plain/wake", least, ratio, "×").of_speed())
            }),
            each(&|of| {
                let least = limit(of, &FASTER_COLD)?;
                let ratio = of.plain_cold.over(&of.wake_cold);
                let name = "plain/wake, nothing in the page cache";
                Some(Bar::least(name, least, ratio, "×").of_speed())
            }),
            each(&|of| {
                limit(of, &FASTER_COLD)?;
                let ratio = of.wake_cold.over(&of.disk);
                let name = "wake/reading the store's files, nothing in the page cache";
                Some(Bar::most(name, MOST_OF_DISK, ratio, "×").of_speed())
            }),
            each(&|of| {
                let ratio = of.parked.over(&of.parked_warm);
                let bar = Bar::most("parked/warm", MOST_OF_WARM, ratio, "×").of_speed();
                PARKED.contains(&&*of.model).then_some(bar)
            }),
            each(&|of| {
                let ratio = of.first_ever.over(&of.plain);
                Some(Bar::most("first ever/plain", MOST_OF_PLAIN_FIRST, ratio, "×").of_speed())
            }),
            each(&|of| {
                let ratio = of.steady.over(&of.steady_plain);
                Some(Bar::least("steady/plain", LEAST_OF_PLAIN_STEADY, ratio, "×").of_speed())
            }),
            each(&|of| {
                let ratio = of.steady.over(&of.steady_bare);
                let name = "steady/plain behind a bare gRPC server";
                Some(Bar::least(name, LEAST_OF_PLAIN_STEADY, ratio, "×").of_speed())
            }),
            each(&|of| {
                Some(Bar::new(
                    "largest difference from plain",
                    format!("at most {MOST_DIFFERENT:.0e}"),
                    format!("{:.0e}", of.largest_difference),
                    of.largest_difference <= MOST_DIFFERENT,
                ))
            }),
            each(&|of| {
                let ratio = of.wake.over(&of.floor);
                Some(Bar::most("wake/floor", MOST_OF_FLOOR, ratio, "×").aim())
            }),
        ]
        .concat()
    }
}

/// A table with one row per model.
fn rows(
    title: &str,
    header: &[&str],
    figures: &[WakeFigures],
    cells: impl Fn(&WakeFigures) -> Vec<String>,
) -> Titled {
    let rows = figures.iter().map(|of| {
        let mut row = vec![of.model.clone()];
        row.extend(cells(of));
        row
    });
    Titled::new(title, header, rows.collect())
}

/// Two measures of each model, and how many times the first the second is.
fn pairs(
    title: &str,
    (one, other, ratio): (&str, &str, &str),
    figures: &[WakeFigures],
    measures: impl Fn(&WakeFigures) -> (&Samples, &Samples),
) -> Titled {
    rows(title, &["model", one, other, ratio], figures, |of| {
        let (one, other) = measures(of);
        vec![one.cell(), other.cell(), times(other.over(one))]
    })
}

/// Answers per second of all sides, and how Dormouse's are to the others'.
fn steady(
    title: &str,
    figures: &[WakeFigures],
    sides: impl Fn(&WakeFigures) -> [&Samples; 3],
) -> Titled {
    rows(
        &format!("{title}; answers/s"),
        &[
            "model",
            "plain, in a loop without a server",
            "plain behind a bare gRPC server",
            "Dormouse through gRPC",
            "Dormouse/loop",
            "Dormouse/bare server",
        ],
        figures,
        |of| {
            let [plain, bare, dormouse] = sides(of);
            vec![
                plain.cell(),
                bare.cell(),
                dormouse.cell(),
                times(dormouse.over(plain)),
                times(dormouse.over(bare)),
            ]
        },
    )
}

/// What each mechanism is worth.
fn ablations(figures: &[WakeFigures]) -> Option<Titled> {
    let mut rows = Vec::new();
    for of in figures {
        let full = ABLATIONS.iter().map(|(name, _)| (*name, &of.wake));
        for (name, full) in full.chain([(STAGED_EXIT, &of.parked)]) {
            if let Some(without) = of.without.get(name) {
                rows.push(vec![
                    of.model.clone(),
                    name.to_owned(),
                    full.cell(),
                    without.cell(),
                    times(without.over(full)),
                ]);
            }
        }
    }
    let title = format!(
        "The next answer with one mechanism switched off; ms. From zero, but for \"{STAGED_EXIT}\": \
         there it is the answer after the time to park, of a model that was parked then and of one \
         that was closed instead"
    );
    let header = [
        "model",
        "switched off",
        "with it",
        "without",
        "without/with",
    ];
    (!rows.is_empty()).then(|| Titled::new(title, &header, rows))
}

//! Stop strings in a text that arrives in pieces.

/// Lets text through up to the first stop string; holds back what could still become one.
#[derive(Debug, Clone, Default)]
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
}

/// What a piece of text amounted to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filtered {
    /// Text that may be shown; never part of a stop string.
    pub text: String,
    /// The stop string that was met. Nothing follows it.
    pub stop: Option<String>,
}

impl StopFilter {
    /// `stops` must not contain the empty string, which every text contains.
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new() }
    }

    /// Takes the next piece. With `armed` unset no stop string is looked for.
    pub fn push(&mut self, piece: &str, armed: bool) -> Filtered {
        self.held.push_str(piece);
        if !armed {
            return Filtered { text: std::mem::take(&mut self.held), stop: None };
        }
        let met = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()).map(|at| (at, stop)))
            .min_by_key(|&(at, stop)| (at, std::cmp::Reverse(stop.len())));
        if let Some((at, stop)) = met {
            let stop = Some(stop.clone());
            self.held.truncate(at);
            return Filtered { text: std::mem::take(&mut self.held), stop };
        }
        let keep = self.stops.iter().map(|stop| partial(&self.held, stop)).max().unwrap_or(0);
        let shown = self.held.len() - keep;
        let text = self.held.drain(..shown).collect();
        Filtered { text, stop: None }
    }

    /// The text that was held back, when nothing follows any more.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that begins `stop`.
fn partial(text: &str, stop: &str) -> usize {
    let longest = stop.len().saturating_sub(1).min(text.len());
    (1..=longest)
        .rev()
        .find(|&len| {
            stop.is_char_boundary(len)
                && text.is_char_boundary(text.len() - len)
                && text.ends_with(&stop[..len])
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let mut filter = StopFilter::new(stops.iter().map(ToString::to_string).collect());
        let mut text = String::new();
        for piece in pieces {
            let got = filter.push(piece, true);
            text += &got.text;
            if got.stop.is_some() {
                return (text, got.stop);
            }
        }
        (text + &filter.finish(), None)
    }

    #[test]
    fn a_stop_across_pieces_is_never_shown() {
        assert_eq!(run(&["END"], &["abcE", "N", "Dxyz"]), ("abc".into(), Some("END".into())));
        assert_eq!(run(&["END"], &["abcE", "N", "x"]), ("abcENx".into(), None));
        assert_eq!(run(&["aab"], &["aa", "ab"]), ("a".into(), Some("aab".into())));
        assert_eq!(run(&["ü!"], &["xü", "!"]), ("x".into(), Some("ü!".into())));
        assert_eq!(run(&[], &["a", "b"]), ("ab".into(), None));
    }

    #[test]
    fn the_earliest_stop_wins() {
        assert_eq!(run(&["c", "b"], &["abcd"]), ("a".into(), Some("b".into())));
        assert_eq!(run(&["b", "bc"], &["abcd"]), ("a".into(), Some("bc".into())));
    }

    #[test]
    fn text_is_held_only_as_long_as_it_must_be() {
        let mut filter = StopFilter::new(vec!["STOP".into()]);
        assert_eq!(filter.push("one ST", true).text, "one ");
        assert_eq!(filter.push("ART", true).text, "START");
        assert_eq!(filter.push("STOP", false).text, "STOP");
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            text in "[abü]{0,24}",
            stops in proptest::collection::vec("[abü]{1,4}", 0..3),
            cuts in proptest::collection::vec(0usize..24, 0..8),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let chars: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(chars.len())).collect();
            cuts.push(chars.len());
            cuts.sort_unstable();
            let mut from = 0;
            let pieces: Vec<String> = cuts
                .into_iter()
                .map(|cut| {
                    let piece = chars[from..cut].iter().collect();
                    from = cut;
                    piece
                })
                .collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let (shown, _) = run(&stops, &pieces);
            let earliest = stops.iter().filter_map(|stop| text.find(stop)).min();
            match earliest {
                // A longer stop that began earlier may still have been open; what is shown ends
                // at or before the first stop string, and is a prefix of the text.
                Some(at) => prop_assert!(text.starts_with(&shown) && shown.len() <= at),
                None => prop_assert_eq!(&shown, &text),
            }
        }
    }
}

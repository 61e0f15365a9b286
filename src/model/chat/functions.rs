//! Functions that transformers gives to chat templates.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

/// What a template said when it raised an exception; travels as the source of the error.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

pub(super) fn raise_exception(reason: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, reason.clone()).with_source(Raised(reason)))
}

/// The reason that the template gave, when it was the template that stopped.
pub(super) fn raised(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(Raised(reason)) = cause.downcast_ref() {
            return Some(reason.clone());
        }
        source = cause.source();
    }
    None
}

/// Replaces the marks that only training uses by blocks that do nothing but keep their control
/// of white space.
pub(super) fn without_generation_marks(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, block) = rest.split_at(start + 2);
        let Some(length) = block.find("%}") else { break };
        let inside = &block[..length];
        result.push_str(before);
        match inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => result.push_str(&inside.replace("generation", "if true")),
            "endgeneration" => result.push_str(&inside.replace("endgeneration", "endif")),
            _ => result.push_str(inside),
        }
        rest = &block[length..];
    }
    result.push_str(rest);
    result
}

/// Python's `datetime.now().strftime`, in UTC, for the codes that templates use.
pub(super) fn strftime_now(format: String) -> Result<String, Error> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(&format, seconds).map_err(|code| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know %{code}"))
    })
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

fn strftime(format: &str, unix_seconds: u64) -> Result<String, char> {
    let days = unix_seconds / 86_400;
    let (year, month, day) = civil_date(days);
    let (hour, minute) = (unix_seconds / 3600 % 24, unix_seconds / 60 % 60);
    let month_name = MONTHS[(month - 1) as usize];
    let day_name = DAYS[(days % 7) as usize];
    let hour_of_half = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let mut code = characters.next().unwrap_or('%');
        let padded = code != '-';
        if !padded {
            code = characters.next().unwrap_or('-');
        }
        let number = |value: u64, width: usize| {
            if padded { format!("{value:0width$}") } else { value.to_string() }
        };
        text.push_str(&match code {
            'Y' => year.to_string(),
            'y' => number(year % 100, 2),
            'm' => number(month, 2),
            'd' => number(day, 2),
            'B' => month_name.to_string(),
            'b' => month_name[..3].to_string(),
            'A' => day_name.to_string(),
            'a' => day_name[..3].to_string(),
            'H' => number(hour, 2),
            'I' => number(hour_of_half, 2),
            'M' => number(minute, 2),
            'S' => number(unix_seconds % 60, 2),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_string(),
            '%' => "%".to_string(),
            other => return Err(other),
        });
    }
    Ok(text)
}

/// Year, month (1 to 12) and day (1 to 31) of a day counted from 1970-01-01.
fn civil_date(days: u64) -> (u64, u64, u64) {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    let mut left = days;
    loop {
        let length = if is_leap(year) { 366 } else { 365 };
        if left < length {
            break;
        }
        left -= length;
        year += 1;
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    (year, month, left + 1)
}

#[cfg(test)]
mod tests {
    use super::{strftime, without_generation_marks};

    #[test]
    fn dates_are_pythons() {
        // python: datetime.fromtimestamp(1709210096, timezone.utc).strftime(...)
        let text = strftime("%d %b %Y, %A %H:%M:%S %-d %I%p 100%%", 1_709_210_096);
        assert_eq!(text.as_deref(), Ok("29 Feb 2024, Thursday 12:34:56 29 12PM 100%"));
        assert_eq!(strftime("%Y-%m-%d %a", 0).as_deref(), Ok("1970-01-01 Thu"));
        assert_eq!(strftime("%Q", 0), Err('Q'));
    }

    #[test]
    fn generation_marks_keep_their_white_space_control() {
        let source = "a{%- generation -%} b {% endgeneration %}{{ generation }}{% if x %}";
        let expected = "a{%- if true -%} b {% endif %}{{ generation }}{% if x %}";
        assert_eq!(without_generation_marks(source), expected);
        for broken in ["{%", "{%}", "{%%}", "%}{% generation"] {
            assert_eq!(without_generation_marks(broken), broken);
        }
    }
}

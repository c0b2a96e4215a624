// SPDX-License-Identifier: Apache-2.0

package jinja

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// strftime is C's, with the flags of glibc.
func strftime(t time.Time, format string) string {
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		i++
		flag := byte(0)
		if strings.IndexByte("-_0^#", format[i]) >= 0 && i+1 < len(format) {
			flag = format[i]
			i++
		}
		number := func(n, width int, pad string) {
			s := strconv.Itoa(n)
			switch flag {
			case '-':
				pad = ""
			case '_':
				pad = " "
			case '0':
				pad = "0"
			}
			if pad != "" && len(s) < width {
				s = strings.Repeat(pad, width-len(s)) + s
			}
			b.WriteString(s)
		}
		word := func(s string) {
			if flag == '^' {
				s = strings.ToUpper(s)
			}
			b.WriteString(s)
		}
		hour := (t.Hour()+11)%12 + 1
		_, week := t.ISOWeek()
		switch format[i] {
		case 'a':
			word(t.Format("Mon"))
		case 'A':
			word(t.Format("Monday"))
		case 'b', 'h':
			word(t.Format("Jan"))
		case 'B':
			word(t.Format("January"))
		case 'c':
			b.WriteString(t.Format("Mon Jan _2 15:04:05 2006"))
		case 'C':
			number(t.Year()/100, 2, "0")
		case 'd':
			number(t.Day(), 2, "0")
		case 'D', 'x':
			b.WriteString(t.Format("01/02/06"))
		case 'e':
			number(t.Day(), 2, " ")
		case 'f':
			fmt.Fprintf(&b, "%06d", t.Nanosecond()/1000)
		case 'F':
			b.WriteString(t.Format("2006-01-02"))
		case 'H':
			number(t.Hour(), 2, "0")
		case 'I':
			number(hour, 2, "0")
		case 'j':
			number(t.YearDay(), 3, "0")
		case 'k':
			number(t.Hour(), 2, " ")
		case 'l':
			number(hour, 2, " ")
		case 'm':
			number(int(t.Month()), 2, "0")
		case 'M':
			number(t.Minute(), 2, "0")
		case 'n':
			b.WriteByte('\n')
		case 'p':
			word(t.Format("PM"))
		case 'P':
			b.WriteString(t.Format("pm"))
		case 'r':
			b.WriteString(t.Format("03:04:05 PM"))
		case 'R':
			b.WriteString(t.Format("15:04"))
		case 's':
			fmt.Fprint(&b, t.Unix())
		case 'S':
			number(t.Second(), 2, "0")
		case 't':
			b.WriteByte('\t')
		case 'T', 'X':
			b.WriteString(t.Format("15:04:05"))
		case 'u':
			number((int(t.Weekday())+6)%7+1, 1, "")
		case 'U':
			number((t.YearDay()+6-int(t.Weekday()))/7, 2, "0")
		case 'V':
			number(week, 2, "0")
		case 'w':
			number(int(t.Weekday()), 1, "")
		case 'W':
			number((t.YearDay()+6-(int(t.Weekday())+6)%7)/7, 2, "0")
		case 'y':
			number(t.Year()%100, 2, "0")
		case 'Y':
			number(t.Year(), 1, "")
		case 'G':
			year, _ := t.ISOWeek()
			number(year, 1, "")
		case 'z', 'Z':
			// Python's naive local time has no zone.
		case '%':
			b.WriteByte('%')
		default:
			b.WriteByte('%')
			if flag != 0 {
				b.WriteByte(flag)
			}
			b.WriteByte(format[i])
		}
	}
	return b.String()
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
)

// texts makes prompts: a beginning that many share, and an end of their own, of prose
// and code. Common words are far more frequent than others, and a few are new each time:
// names, numbers, identifiers. No two are the same.
type texts struct {
	rng    *rand.Rand
	often  *rand.Zipf // of words
	shared string
}

func newTexts(rng *rand.Rand) *texts {
	t := &texts{rng: rng, often: rand.NewZipf(rng, 1.1, 6, uint64(len(words)-1))}
	t.shared = t.text(1 << 20)
	return t
}

func (t *texts) text(size int) string {
	var b strings.Builder
	for b.Len() < size {
		if t.rng.IntN(5) == 0 {
			t.code(&b)
		} else {
			t.paragraph(&b)
		}
	}
	return b.String()[:size]
}

func (t *texts) paragraph(b *strings.Builder) {
	for range 2 + t.rng.IntN(4) {
		n := 5 + t.rng.IntN(18)
		for i := range n {
			w := t.word()
			if i == 0 {
				w = strings.ToUpper(w[:1]) + w[1:]
			}
			b.WriteString(w)
			switch {
			case i == n-1:
				b.WriteString([]string{". ", ". ", ". ", "? ", ": "}[t.rng.IntN(5)])
			case t.rng.IntN(10) == 0:
				b.WriteString(", ")
			default:
				b.WriteByte(' ')
			}
		}
	}
	b.WriteString("\n\n")
}

func (t *texts) code(b *strings.Builder) {
	fmt.Fprintf(b, "func %s(%s int) error {\n", t.name(), t.word())
	for range 2 + t.rng.IntN(6) {
		fmt.Fprintf(b, "\tif %s := %s.%s(%q, %d); %s != nil {\n\t\treturn %s\n\t}\n", t.word(), t.word(), t.name(), t.word(), t.rng.IntN(1000), t.word(), t.name())
	}
	b.WriteString("}\n\n")
}

// word returns a word, one in 40 times one that is new.
func (t *texts) word() string {
	switch t.rng.IntN(120) {
	case 0:
		return t.name()
	case 1:
		return strconv.Itoa(t.rng.IntN(100_000))
	case 2:
		return strconv.FormatUint(t.rng.Uint64()>>32, 16)
	}
	return words[t.often.Uint64()]
}

// name is one as programs have it.
func (t *texts) name() string {
	w := words[t.rng.IntN(len(words))]
	return words[t.rng.IntN(len(words))] + strings.ToUpper(w[:1]) + w[1:]
}

// body is a chat request of about size bytes; seven tenths of it are the same in all.
func (t *texts) body(size, tokens int) []byte {
	return fmt.Appendf(nil, bodyBegin+`"stream":%v,"messages":[{"role":"system","content":%q},{"role":"user","content":%q}]}`,
		tokens, tokens > 0, t.shared[:size*7/10], t.text(size*3/10))
}

// words are some of the commonest of English, then of what is asked of models.
//
//nolint:gochecknoglobals // a table
var words = strings.Fields(`
the of and to a in is it that for was on are as with be at this have from or one had by not but what all were when we there
can an your which their said if do will each about how up out them then she many some so these would other into has more her
two like him see time could no make than first been its who now people my made over did down only way find use may water
long little very after words called just where most know get through back much before go good new write our used me man too
any day same right look think also around another came come work three word must because does part even place well such here
take why things help put years different away again off went old number great tell men say small every found still between
name should home big give air line set own under read last never us left end along while might next sound below saw
something thought both few those always looked show large often together asked house world going want school important until
form food keep children feet land side without boy once animal life enough took sometimes four head above kind began almost
live page got earth need far hand high year mother light country father let night picture being study second soon story
since white ever paper hard near sentence better best across during today however sure means knew try told young sun thing
whole hear example heard several change answer room sea against top turned learn point city play toward five himself usually
money seen car morning given body family later turn move face door cut done group true half red fish plants living black
please explain summarize describe compare following question context document report list table table code function return
error value string list field type class method object request response server client network address message system model
token cache block memory worker engine router queue latency load balance policy decision prompt prefix sequence index
database query user account order customer product price invoice payment delivery contract market company board growth
revenue quarter budget forecast risk analysis result measure average percent increase decrease trend season region team
project plan schedule deadline meeting review feedback release version feature issue test build deploy monitor alert log
metric trace container cluster node service storage backup security access permission password secret certificate key
translate language grammar paragraph title chapter author character scene dialogue poem letter email subject reply draft
science physics energy force mass particle wave quantum theory experiment observation hypothesis chemistry molecule reaction
biology cell protein gene species evolution disease treatment patient doctor hospital medicine symptom diagnosis vaccine
history war treaty empire revolution king parliament election government law court judge evidence witness rights freedom
mathematics equation matrix vector derivative integral probability distribution variance theorem proof algorithm complexity
recursion iteration parallel thread process lock channel buffer stream socket packet protocol header payload compress encode
decode parse format template render layout style color image camera video audio music song concert theatre museum travel
flight hotel restaurant recipe ingredient temperature kitchen garden weather mountain river forest island beach`)

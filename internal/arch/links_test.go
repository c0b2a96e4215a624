// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"fmt"
	"go/ast"
	"go/doc/comment"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestDocLinks fails on links in comments, such as [Name], [pkg.Name] or [Type.Method], to names that
// do not exist.
func TestDocLinks(t *testing.T) {
	links := 0
	for _, p := range checkPackages(t) {
		n, broken := brokenLinks(&p)
		links += n
		for _, b := range broken {
			t.Error(b)
		}
	}
	if links < 100 {
		t.Errorf("only %d links were found", links)
	}
}

// brokenLinks counts the links in the comments of a package, and returns a sentence for each that
// leads nowhere.
func brokenLinks(p *checkedPackage) (links int, broken []string) {
	imports := map[string]string{} // import paths by the name in the files
	for _, f := range p.files {
		for _, spec := range f.Imports {
			path, _ := strconv.Unquote(spec.Path.Value)
			imported, err := p.imported(path)
			switch {
			case err != nil:
			case spec.Name != nil:
				imports[spec.Name.Name] = path
			default:
				imports[imported.Name()] = path
			}
		}
	}
	// The parser takes each word in brackets for a link whose package or name is known: all are.
	linkParser := comment.Parser{
		LookupPackage: func(name string) (path string, ok bool) { return name, true },
		LookupSym:     func(_, _ string) bool { return true },
	}
	for _, f := range p.files {
		for _, group := range f.Comments {
			for _, link := range docLinks(linkParser.Parse(group.Text())) {
				if !linkWords.MatchString(linkText(link)) {
					continue
				}
				links++
				if !leads(p, imports, link) {
					broken = append(broken, fmt.Sprintf("%s: the link [%s] leads nowhere", p.fset.Position(group.Pos()), linkText(link)))
				}
			}
		}
	}
	return links, broken
}

// docLinks returns the links of a parsed comment.
func docLinks(d *comment.Doc) (links []*comment.DocLink) {
	var inText func(parts []comment.Text)
	inText = func(parts []comment.Text) {
		for _, part := range parts {
			switch part := part.(type) {
			case *comment.DocLink:
				links = append(links, part)
			case *comment.Link:
				inText(part.Text)
			}
		}
	}
	var inBlocks func(blocks []comment.Block)
	inBlocks = func(blocks []comment.Block) {
		for _, block := range blocks {
			switch block := block.(type) {
			case *comment.Heading:
				inText(block.Text)
			case *comment.Paragraph:
				inText(block.Text)
			case *comment.List:
				for _, item := range block.Items {
					inBlocks(item.Content)
				}
			}
		}
	}
	inBlocks(d.Content)
	return links
}

// linkText returns what stands between the brackets of a link.
func linkText(l *comment.DocLink) string {
	parts := []string{l.ImportPath, l.Recv, l.Name}
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), ".")
}

// linkWords matches the text of a link. Other text in brackets, such as [0-9], is ignored.
var linkWords = regexp.MustCompile(`^[\w/]+(\.\w+)*$`)

// leads reports whether a link leads to a package, to a name of its own or of an imported package, or
// to a method or field of such a name.
func leads(p *checkedPackage, imports map[string]string, l *comment.DocLink) bool {
	// The parser takes a name without a capital letter for a package: [name] and [type.method].
	if recv, name, _ := strings.Cut(l.ImportPath, "."); l.Name == "" && find(p.types, "", recv) {
		return name == "" || find(p.types, recv, name)
	}
	if l.ImportPath == "" {
		return find(p.types, l.Recv, l.Name)
	}
	path, known := imports[l.ImportPath]
	if !known {
		path = l.ImportPath // a package of the standard library needs no import
	}
	if other, err := p.imported(path); err == nil {
		return l.Name == "" || find(other, l.Recv, l.Name)
	}
	return find(p.types, l.ImportPath, l.Name) // [type.Method]
}

// find reports whether a package has a name, or its name of a type has a method or field.
func find(p *types.Package, of, name string) bool {
	if of == "" {
		return p.Scope().Lookup(name) != nil
	}
	parent := p.Scope().Lookup(of)
	if parent == nil {
		return false
	}
	member, _, _ := types.LookupFieldOrMethod(parent.Type(), true, parent.Pkg(), name)
	return member != nil
}

func TestDocLinksCanFail(t *testing.T) {
	const source = `// Package p links to [T], [T.M], [T.F], [*T], [own], [strings.Builder], [strings.Builder.Len], [strings], [io],
// [own] and [t.f].
//
//	code[1] and [Code] are no links
//
// This is a list:
//
//   - no name is [Gone], [t.g] or [t.Lost]
package p

import "strings"

// A T has [T.Lost], and is no [strings.Gone] and no [strings.Builder.Gone].
type T struct {
	F strings.Builder // no [away]
}

// M is no [lost.Name].
func (T) M() {}

type t struct{ f int }

func own() { /* neither a[0] nor []string nor [0, 1] */ }
`
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, "p.go", source, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	imports := importer.ForCompiler(fset, "source", nil)
	pkg, err := (&types.Config{Importer: imports}).Check("p", fset, []*ast.File{f}, nil)
	if err != nil {
		t.Fatal(err)
	}
	links, broken := brokenLinks(&checkedPackage{fset: fset, files: []*ast.File{f}, types: pkg, imported: imports.Import})
	got := strings.Join(broken, "\n")
	for _, want := range []string{"[Gone]", "[t.g]", "[t.Lost]", "[T.Lost]", "[strings.Gone]", "[strings.Builder.Gone]", "[away]", "[lost.Name]"} {
		if !strings.Contains(got, "the link "+want+" leads nowhere") {
			t.Errorf("%s is not reported", want)
		}
	}
	if links != 19 || len(broken) != 8 {
		t.Errorf("%d links, want 19, of which 8 lead nowhere:\n%s", links, got)
	}
}

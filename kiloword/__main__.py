from kiloword.cli import main

main()
